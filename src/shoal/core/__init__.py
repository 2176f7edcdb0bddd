"""The words everybody shares: requests, plans, events, ports and time. Standard library and numpy only."""
