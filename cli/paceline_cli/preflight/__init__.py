"""What a careful engineer looks at before a big run: facts of every node, and checks over them."""
