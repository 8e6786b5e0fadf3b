"""The step model: per step and rank, who computed, who waited, who idled."""
