"""Where subscriptions are stored, with their consumers and starts."""
