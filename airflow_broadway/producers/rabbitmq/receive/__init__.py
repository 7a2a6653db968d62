"""The half that receives: bundles are secured before messages are handed out."""
