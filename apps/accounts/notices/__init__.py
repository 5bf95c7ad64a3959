"""What people are told: mail, and the notifications that pages list."""
