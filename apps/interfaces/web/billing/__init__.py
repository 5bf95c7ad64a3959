"""Money pages: credit, budgets, charges, invoices and usage."""
