"""What all rooms share: requests, plans, events, ports and time. Standard library and numpy only."""
