"""Calls on money: balance, ledger, invoices, prices, costs and requests for credit."""
