"""The op while Dynamo traces it: its mods, their captures, and the numbers that change."""
