"""What runs on the login host: a config becomes a plan, the plan is printed or sent, the run is followed. Never imports torch."""
