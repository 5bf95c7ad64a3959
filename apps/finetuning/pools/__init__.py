"""GPU pools from the operator's side: machines, calibration, accuracy and margins."""
