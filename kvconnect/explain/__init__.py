"""What two workers would do with each other, worked out from their configurations, with neither running."""
