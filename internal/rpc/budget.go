package rpc

import "sync"

// FreeShare is what the inbound actions of one connection may hold without drawing on
// its Budget: however much others send, a connection of ordinary size is served.
const FreeShare = 1 << 20

// Budget bounds what the inbound actions of many connections hold together, above
// each one's FreeShare. It is safe for concurrent use; nil bounds nothing.
type Budget struct {
	mu   sync.Mutex
	max  int
	used int
}

// NewBudget makes a budget of so many bytes.
func NewBudget(max int) *Budget { return &Budget{max: max} }

// Used is how many bytes are drawn now.
func (b *Budget) Used() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// move accounts for a connection that held so many bytes and is to hold more or fewer.
// It reports false, and changes nothing, if that goes beyond the budget; force goes
// beyond.
func (b *Budget) move(before, after int, force bool) bool {
	if b == nil {
		return true
	}
	by := max(0, after-FreeShare) - max(0, before-FreeShare)
	if by == 0 {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if by > 0 && !force && b.used+by > b.max {
		return false
	}
	b.used += by
	return true
}
