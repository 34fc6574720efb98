package sqlite

func crashChild() bool { return false }
