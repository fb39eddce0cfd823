"""A recorded run as a page."""
