"""Pages of the organization: members, keys, audit log, trackers and licences."""
