package httpapi

import (
	"net/http"
	"strconv"
	"sync"

	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/broker"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// budgetBytes bounds what the requests of one workspace, or of one admin key,
// hold in memory at the same time: bodies that are read whole, output that is
// answered as JSON, and requestBytes for each. Encoded and decoded it takes a few
// times as much. It is 2,000 requests, or a hundred of the largest there are.
// What passes through in pieces (frames, files, sockets) counts passBytes: it is
// little, but stays for hours with a connection of its own. It is 8,000 of them.
// A relay job counts until it was sent; then the relay has a limit of jobs.
const (
	budgetBytes  = 512 << 20
	requestBytes = 256 << 10
	passBytes    = 64 << 10
	readBytes    = 1 << 20 // what a read brings that names nothing (package broker)
)

// budget counts by tenant, so that one cannot take the memory of all.
type budget struct {
	most int64

	mu   sync.Mutex
	held map[string]int64
}

// take counts n bytes in, until give.
func (b *budget) take(who string, n int64) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held[who]+n > b.most {
		return errdefs.New(errdefs.Exhausted, "the requests under way hold %d bytes, %d more would exceed the limit of %d for one workspace", b.held[who], n, b.most).
			WithNext("try again when some have ended, or read output as frames").With("limit_bytes", itoa(b.most))
	}
	b.held[who] += n
	return nil
}

func (b *budget) give(who string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held[who] -= n; b.held[who] == 0 {
		delete(b.held, who)
	}
}

// hold is what one request has of a budget.
type hold struct {
	b   *budget
	who string
	n   int64
}

// give gives it back; a second time there is nothing to give.
func (h *hold) give() {
	h.b.give(h.who, h.n)
	h.n = 0
}

// payer is whose budget a request of p is counted in.
func payer(p authz.Principal) string {
	if p.Workspace != "" {
		return "w:" + p.Workspace
	}
	return "k:" + p.Key
}

// weight is how much of a request is held in memory.
func weight(r *http.Request, rt *route) int64 {
	n := int64(0)
	switch {
	case rt.streamed && rt.media != jsonMedia, rt.reads && wantsFrames(r), rt.sockets:
		return passBytes
	case rt.reads:
		n = readBytes
		if most, err := strconv.ParseInt(r.URL.Query().Get("max_bytes"), 10, 64); err == nil && most > 0 {
			n = min(most, broker.MaxRead)
		}
	case rt.maxBody == 0:
	case r.ContentLength >= 0:
		n = min(r.ContentLength, rt.maxBody)
	default:
		n = rt.maxBody
	}
	return requestBytes + n
}
