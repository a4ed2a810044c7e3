"""The objectives in other people's libraries; each module is imported by its own name and needs that library."""
