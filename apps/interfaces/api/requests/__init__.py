"""What every API view shares: authentication, parsing, names, permissions and pages."""
