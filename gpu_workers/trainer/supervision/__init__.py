"""The supervision of one attempt on this machine, which leads it or is one of its other machines."""
