"""What a replica reports: conditions, events, durations, request counts."""
