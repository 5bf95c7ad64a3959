"""Messages to people and programs: mail, webhooks, and the notifications that pages list."""
