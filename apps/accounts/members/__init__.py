"""Who acts in an organization: members and their roles, invitations, and service accounts."""
