"""In front of Django: the front door and the limits that hold for web and API alike."""
