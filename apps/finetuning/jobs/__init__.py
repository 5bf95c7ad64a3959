"""Jobs from the customer's side: creation, control, retries, progress and explanations."""
