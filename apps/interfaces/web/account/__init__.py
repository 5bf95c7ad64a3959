"""Pages of the organization: members, keys, audit log, trackers, licences and saved views."""
