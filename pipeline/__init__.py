"""Training, export and evaluation of DFlash block drafters on stored hidden states."""
