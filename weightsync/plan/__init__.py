"""Planning a reload: dry run, proof, plan; see plan.py for the whole in ten lines."""
