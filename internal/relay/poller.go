package relay

import (
	"os"
	"runtime"
	"sync"
)

// poller lets a reader that has much to do give way to connections that have input.
//
// runtime.Gosched alone does not: as long as a goroutine can run, the scheduler looks
// for input every 10 ms only (findRunnable and sysmon in runtime/proc.go), and on one
// processor an acknowledgement waits that long beside a flood. So one goroutine waits
// for input of a pipe, and who gives way writes a byte to it and waits for that
// goroutine: the scheduler has to look, and finds everybody else's input with it.
type poller struct {
	r, w *os.File // nil: there was no pipe to be had
	done chan struct{}

	mu    sync.Mutex
	wait  []chan<- struct{}
	spare []chan<- struct{}
}

// newPoller starts the goroutine; close ends it.
func newPoller() *poller {
	p := &poller{done: make(chan struct{})}
	var err error
	if p.r, p.w, err = os.Pipe(); err != nil {
		p.r, p.w = nil, nil // slower beside a flood, not wrong
		close(p.done)
		return p
	}
	go p.run()
	return p
}

func (p *poller) run() {
	defer close(p.done)
	var b [64]byte
	for {
		if _, err := p.r.Read(b[:]); err != nil {
			return
		}
		p.mu.Lock()
		p.wait, p.spare = p.spare[:0], p.wait
		all := p.spare
		for _, c := range all {
			c <- struct{}{} // has room: each waits once
		}
		p.mu.Unlock()
	}
}

// giveWay returns after the scheduler has looked for input. way has room for one and
// is the caller's own.
func (p *poller) giveWay(way chan struct{}) {
	if p.w == nil {
		runtime.Gosched()
		return
	}
	p.mu.Lock()
	first := len(p.wait) == 0
	p.wait = append(p.wait, way)
	p.mu.Unlock()
	if first {
		// A pipe takes a byte at once: at most one is in it.
		if _, err := p.w.Write([]byte{0}); err != nil {
			return // closed: nobody reads any more
		}
	}
	<-way
}

// close ends the goroutine. Nobody may give way any more.
func (p *poller) close() {
	if p.w != nil {
		p.w.Close()
		<-p.done
		p.r.Close()
	}
}
