"""Access to Stripe: calls, objects, events, and copies of invoices there."""
