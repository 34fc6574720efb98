package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// relayPayload says what a peer does with a job. Both hubs are given the same.
type relayPayload struct {
	Events int    `json:"events"`        // how many to send; -1: until it is cancelled
	Size   int    `json:"size"`          // bytes of one event
	Hold   bool   `json:"hold"`          // do not finish before the cancel
	Tool   bool   `json:"tool"`          // make one tool call first
	Pad    string `json:"pad,omitempty"` // makes the payload large
}

// relayPeer is a daemon that costs next to nothing: frames are made once per job
// and written many at a time, so that what is measured is the hub.
type relayPeer struct {
	conn net.Conn
	in   *bufio.Reader

	mu   sync.Mutex // writing
	jobs sync.WaitGroup
	done chan struct{}

	stopMu sync.Mutex
	stops  map[string]*atomic.Bool
}

// writeSize is how much a peer writes at once.
const writeSize = 64 << 10

// dialRelay connects and shakes hands as WebSocket does (RFC 6455), no further.
func dialRelay(ctx context.Context, url string) (*relayPeer, error) {
	addr := strings.TrimPrefix(strings.TrimSuffix(url, "/"), "ws://")
	conn, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the hub cannot be reached: %v", err)
	}
	p := &relayPeer{conn: conn, in: bufio.NewReaderSize(conn, 1<<10), done: make(chan struct{}), stops: map[string]*atomic.Bool{}}
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: c3RvY2thZGUgYmVuY2ggIQ==\r\n%s\r\n", addr, "")
	resp, err := http.ReadResponse(p.in, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		conn.Close()
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the hub did not upgrade the connection")
	}
	return p, nil
}

// hello says who this is and returns how long the hub took to say ready.
func (p *relayPeer) hello(id, token string) (time.Duration, error) {
	start := time.Now()
	if err := p.send(&relaywire.Frame{Type: relaywire.Hello, DaemonID: id, Protocol: relaywire.Protocol, Token: token, Metadata: json.RawMessage(`{"pid":1}`)}); err != nil {
		return 0, err
	}
	b, err := p.message()
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	if f, err := relaywire.Decode(b, 0); err != nil || f.Type != relaywire.Ready {
		return 0, errdefs.New(errdefs.Internal, "the hub did not say ready but %.100s", b)
	}
	_ = p.conn.SetDeadline(time.Time{})
	return took, nil
}

// connectRelay is a peer that serves jobs until it is closed.
func connectRelay(ctx context.Context, url, id, token string) (*relayPeer, error) {
	p, err := dialRelay(ctx, url)
	if err != nil {
		return nil, err
	}
	if _, err := p.hello(id, token); err != nil {
		p.conn.Close()
		return nil, err
	}
	go p.serve()
	return p, nil
}

func (p *relayPeer) close() {
	p.conn.Close()
	<-p.done
}

func (p *relayPeer) serve() {
	defer close(p.done)
	defer p.jobs.Wait()
	defer p.conn.Close()
	for {
		b, err := p.message()
		if err != nil {
			return
		}
		f, err := relaywire.Decode(b, 0)
		if err != nil {
			continue
		}
		switch f.Type {
		case relaywire.Start:
			var do relayPayload
			if json.Unmarshal(f.Payload, &do) != nil {
				continue
			}
			stop := new(atomic.Bool)
			p.stopMu.Lock()
			p.stops[f.JobID] = stop
			p.stopMu.Unlock()
			p.jobs.Add(1)
			go func() {
				defer p.jobs.Done()
				p.job(f.JobID, do, stop)
			}()
		case relaywire.Cancel:
			p.stopMu.Lock()
			stop := p.stops[f.JobID]
			delete(p.stops, f.JobID)
			p.stopMu.Unlock()
			if stop != nil {
				stop.Store(true)
				go p.finish(f.JobID)
			}
		}
	}
}

func (p *relayPeer) finish(job string) {
	_ = p.send(&relaywire.Frame{Type: relaywire.Finished, JobID: job}) // a lost connection is seen by the reader
}

// job carries out one job. A failed write ends it: the reader sees the same.
func (p *relayPeer) job(id string, do relayPayload, stop *atomic.Bool) {
	if do.Tool {
		call := json.RawMessage(`{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"slow"}}`)
		if p.send(&relaywire.Frame{Type: relaywire.MCPRequest, JobID: id, RequestID: "bench", Payload: call}) != nil {
			return
		}
	}
	one := message(eventFrame(id, do.Size))
	many := one
	for len(many)+len(one) <= writeSize {
		many = append(many, one...)
	}
	each := len(many) / len(one)
	for sent := 0; (do.Events < 0 || sent < do.Events) && !stop.Load(); {
		b := many
		if do.Events >= 0 && do.Events-sent < each {
			b = many[:(do.Events-sent)*len(one)]
		}
		if p.write(b) != nil {
			return
		}
		sent += len(b) / len(one)
	}
	if do.Hold || do.Events < 0 {
		return // the cancel finishes it
	}
	p.stopMu.Lock()
	_, mine := p.stops[id]
	delete(p.stops, id)
	p.stopMu.Unlock()
	if mine {
		p.finish(id)
	}
}

// eventFrame is a run.event whose event has size bytes: text as an agent writes it,
// with the line breaks, quotes and umlauts that a parser has to look at.
func eventFrame(job string, size int) []byte {
	const head, tail = `{"type":"message.delta","data":{"chunk":{"role":"assistant","content":"`, `"}}}`
	const text = `The test \"TestParse\" fails because the reader skips the last line:\n\n\tfor scanner.Scan() {\n\t\tlines = append(lines, scanner.Text())\n\t}\n\nDas ändert sich, wenn \u2026 `
	n := max(0, size-len(head)-len(tail))
	content := strings.Repeat(text, n/len(text)) + strings.Repeat("x", n%len(text))
	return relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Event, JobID: job, Event: json.RawMessage(head + content + tail)})
}

func (p *relayPeer) send(f *relaywire.Frame) error { return p.write(message(relaywire.Append(nil, f))) }

func (p *relayPeer) write(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.conn.Write(b)
	return err
}

// message is one text message from a client, masked as it must be.
func message(payload []byte) []byte { return clientFrame(1, payload) }

func clientFrame(opcode byte, payload []byte) []byte {
	mask := [4]byte{1, 2, 3, 4}
	out := []byte{0x80 | opcode}
	switch n := len(payload); {
	case n < 126:
		out = append(out, 0x80|byte(n))
	case n < 1<<16:
		out = binary.BigEndian.AppendUint16(append(out, 0x80|126), uint16(n))
	default:
		out = binary.BigEndian.AppendUint64(append(out, 0x80|127), uint64(n))
	}
	out = append(out, mask[:]...)
	for i, c := range payload {
		out = append(out, c^mask[i%4])
	}
	return out
}

// maxFromHub bounds a message of the hub.
const maxFromHub = 64 << 20

var errClosed = errors.New("the hub closed the connection")

// message reads one message of the hub and answers its pings.
func (p *relayPeer) message() ([]byte, error) {
	var all []byte
	for {
		var h [2]byte
		if _, err := io.ReadFull(p.in, h[:]); err != nil {
			return nil, err
		}
		n := int64(h[1] & 0x7f)
		switch n {
		case 126:
			var b [2]byte
			if _, err := io.ReadFull(p.in, b[:]); err != nil {
				return nil, err
			}
			n = int64(binary.BigEndian.Uint16(b[:]))
		case 127:
			var b [8]byte
			if _, err := io.ReadFull(p.in, b[:]); err != nil {
				return nil, err
			}
			n = int64(binary.BigEndian.Uint64(b[:]))
		}
		if n < 0 || int64(len(all))+n > maxFromHub {
			return nil, errdefs.New(errdefs.Internal, "the hub sent a message of %d bytes", n)
		}
		b := make([]byte, n)
		if _, err := io.ReadFull(p.in, b); err != nil {
			return nil, err
		}
		switch h[0] & 0x0f {
		case 8:
			return nil, errClosed
		case 9:
			if err := p.write(clientFrame(10, b)); err != nil {
				return nil, err
			}
		case 0, 1, 2:
			if all = append(all, b...); h[0]&0x80 != 0 {
				return all, nil
			}
		}
	}
}
