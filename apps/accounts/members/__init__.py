"""The parties that act in an organization: members with their roles, invited people, and service accounts."""
