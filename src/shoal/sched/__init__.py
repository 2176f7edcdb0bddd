"""What runs next: policies by axis, and the one scheduler that combines them. No torch, no clock."""
