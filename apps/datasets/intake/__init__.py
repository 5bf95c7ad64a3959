"""Files on their way in: uploads, versions, lanes, and objects that no version refers to."""
