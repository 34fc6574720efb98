package relayclient

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// flushBound is for the last words of a connection: telling a hub that this program
// stops is worth a moment, not more.
const flushBound = 5 * time.Second

// session is one connection.
type session struct {
	*client
	conn *websocket.Conn
	out  *outbox
	fail context.CancelCauseFunc // ends the connection
	jobs sync.WaitGroup

	mu       sync.Mutex
	live     map[string]*job
	pending  map[string]chan json.RawMessage // tool calls, by request id
	stopping error                           // set when no more jobs are taken
	halt     *UnconfirmedError
}

// serve connects, serves until the connection or ctx ends, and returns when every
// job has ended. The error says why the connection ended.
func (s *session) serve(ctx context.Context) error {
	if err := s.connect(ctx); err != nil {
		return err
	}
	s.log.Info("connected to the hub", "daemon_id", s.cfg.DaemonID)
	s.out = newOutbox(s.limits.QueueBytes)
	s.live, s.pending = map[string]*job{}, map[string]chan json.RawMessage{}
	conn, fail := context.WithCancelCause(context.WithoutCancel(ctx))
	s.fail = fail
	var own sync.WaitGroup
	// A context that ends under a read or write breaks the connection, and the hub
	// would not be told why. So these end by closing it.
	unending := context.WithoutCancel(ctx)
	own.Go(func() { fail(s.read(unending)) })
	own.Go(func() { fail(s.write(conn)) })
	own.Go(func() { fail(s.ping(conn)) })

	code, reason := websocket.StatusNormalClosure, "daemon stopped"
	select {
	case <-ctx.Done():
		s.endJobs(errStopping)
		if s.unconfirmed() == nil {
			s.flush(conn)
		}
	case <-conn.Done():
		s.stopJobs(errLost)
		if s.unconfirmed() == nil { // else the hub is told while they end
			s.out.close()
			s.endJobs(errLost)
		}
	}
	if s.unconfirmed() != nil {
		code, reason = relaywire.CloseHalted, relaywire.ReasonHalted
	}
	_ = s.conn.Close(code, reason) // what is wrong with the connection is known
	err := context.Cause(conn)
	fail(errLost)
	s.out.close()
	s.endJobs(errLost)
	own.Wait()
	_ = s.conn.CloseNow()
	return err
}

// dialer lets at most that many bytes, as the kernel counts, wait in it on a
// connection, if that is more than none: an acknowledgement stands behind them.
func dialer(bytes int) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, addr)
		if tcp, ok := conn.(*net.TCPConn); ok && bytes > 0 {
			_ = tcp.SetWriteBuffer(bytes) // a wish: without it only latency suffers
		}
		return conn, err
	}
}

// connect dials and shakes hands within their time-outs.
func (s *session) connect(ctx context.Context) error {
	dial, cancel := context.WithTimeout(ctx, s.limits.ConnectTimeout)
	defer cancel()
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, DialContext: dialer(s.limits.SocketBytes / 4)}
	defer transport.CloseIdleConnections() // a WebSocket is none of them
	conn, res, err := websocket.Dial(dial, s.cfg.URL, &websocket.DialOptions{
		CompressionMode: websocket.CompressionDisabled,
		// A redirect would take the token to somebody else.
		HTTPClient: &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
	})
	if res != nil && res.Body != nil {
		_ = res.Body.Close()
	}
	if err != nil {
		return err
	}
	s.conn = conn
	conn.SetReadLimit(s.limits.ReadLimit())
	hello, cancel2 := context.WithTimeout(ctx, s.limits.ReadyTimeout)
	defer cancel2()
	var data []byte
	if err = conn.Write(hello, websocket.MessageText, s.hello); err == nil {
		_, data, err = conn.Read(hello)
	}
	if err == nil {
		f, derr := relaywire.Decode(data, 0)
		switch {
		case derr != nil || f.Type != relaywire.Ready:
			err = protocolError("the hub did not answer daemon.hello with daemon.ready")
		case f.Protocol != relaywire.Protocol:
			err = protocolError("the hub speaks another protocol than " + relaywire.Protocol)
		}
	} else if hello.Err() != nil && ctx.Err() == nil {
		err = protocolError("the hub did not answer daemon.hello in time")
	}
	if err != nil {
		_ = conn.CloseNow()
	}
	return err
}

// flush waits a moment for the last frames to be written.
func (s *session) flush(conn context.Context) {
	t := time.NewTimer(flushBound)
	defer t.Stop()
	select {
	case <-s.out.flushed():
	case <-conn.Done():
	case <-t.C:
	}
}

func (s *session) unconfirmed() *UnconfirmedError {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.halt
}

// halted is told by a job whose end is not confirmed.
func (s *session) halted(u *UnconfirmedError) {
	s.mu.Lock()
	if s.halt == nil {
		s.halt = u
	}
	s.stopping = u
	s.mu.Unlock()
	s.log.Error("this machine takes no more jobs", "error", u)
	s.fail(u)
}

func (s *session) write(ctx context.Context) error {
	for {
		frame, over, err := s.out.take(ctx)
		if err != nil {
			return err
		}
		if over != nil {
			// Before the hub can know: what it sends next may be a job of the same id.
			s.forget(over)
		}
		w, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.limits.StallTimeout)
		err = s.conn.Write(w, websocket.MessageText, frame)
		cancel()
		if err != nil {
			return fmt.Errorf("write: %w", err)
		}
	}
}

// ping asks a silent hub for a sign of life, so that a dead connection is seen.
func (s *session) ping(ctx context.Context) error {
	if s.limits.PingInterval < 0 {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	t := time.NewTicker(s.limits.PingInterval)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		// The ping waits its turn behind a frame that is being written.
		p, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.limits.PongTimeout+s.limits.StallTimeout)
		err := s.conn.Ping(p)
		cancel()
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("the hub gives no sign of life: %w", err)
		}
	}
}

func (s *session) read(ctx context.Context) error {
	var f relaywire.Frame
	for {
		_, data, err := s.conn.Read(ctx) // binary messages count as text
		if err != nil {
			return err
		}
		if err := f.Decode(data, 0); err != nil {
			s.log.Warn("the hub sent a message that is none", "error", err)
			continue
		}
		if err := s.handle(f); err != nil {
			return err
		}
	}
}

// handle takes one frame and waits for nobody.
func (s *session) handle(f relaywire.Frame) error {
	switch f.Type {
	case relaywire.Start:
		return s.start(f)
	case relaywire.Cancel:
		s.mu.Lock()
		j := s.live[f.JobID]
		s.mu.Unlock()
		if j != nil {
			s.out.drop(j.lane)
			j.cancel(errCancelled) // again is nothing
		}
	case relaywire.MCPResponse:
		s.mu.Lock()
		answer := s.pending[f.RequestID]
		delete(s.pending, f.RequestID)
		s.mu.Unlock()
		if answer != nil {
			answer <- f.Payload // holds one
		}
	case relaywire.Cleanup:
		return protocolError("the hub is older than " + relaywire.Protocol)
	}
	return nil
}

// Why a tool call failed.
var (
	errTimeout = errors.New("the host did not answer in time")
	errOver    = errors.New("the job is over")
)

// call forwards a tool call of a job. At most limits.MCPCalls of a job are under
// way, which the proxy sees to.
func (s *session) call(ctx context.Context, jobID string, payload json.RawMessage, timeout time.Duration) (json.RawMessage, error) {
	var random [12]byte
	rand.Read(random[:])
	id := base64.RawURLEncoding.EncodeToString(random[:])
	answer := make(chan json.RawMessage, 1)
	s.mu.Lock()
	s.pending[id] = answer
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.pending, id)
		s.mu.Unlock()
	}()
	c := &toolCall{relaywire.Append(nil, &relaywire.Frame{Type: relaywire.MCPRequest, RequestID: id, JobID: jobID, Payload: payload})}
	if err := s.out.call(c); err != nil {
		return nil, err
	}
	defer s.out.withdraw(c)
	t := time.NewTimer(timeout)
	defer t.Stop()
	select {
	case a := <-answer:
		return a, nil
	case <-t.C:
		return nil, errTimeout
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
