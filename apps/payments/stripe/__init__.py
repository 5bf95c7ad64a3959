"""The one door to Stripe: its calls, objects, events, and copies of our invoices there."""
