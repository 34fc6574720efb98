package host

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// fake is a host that does whatever a test wants with each connection.
func fake(t *testing.T, serve func(net.Conn)) *Client {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serve(c)
			c.Close()
		}
	}()
	c := NewClient(func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", l.Addr().String())
	}, 1)
	t.Cleanup(func() {
		c.CloseIdle()
		l.Close()
		<-done
	})
	return c
}

// says answers any request with this text and hangs up.
func says(text string) func(net.Conn) {
	return func(c net.Conn) {
		buf := make([]byte, 64<<10)
		_, _ = c.Read(buf)
		_, _ = io.WriteString(c, text)
	}
}

func head(status, kind string) string {
	return "HTTP/1.1 " + status + "\r\nConnection: close\r\nContent-Type: " + kind + "\r\n\r\n"
}

func TestClientSaysWhatIsKnownAboutAFailure(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	ask := map[string]func(*Client) error{
		"ask":  func(c *Client) error { _, err := c.Procs(ctx); return err },
		"do":   func(c *Client) error { _, err := c.Start(ctx, wire.ProcSpec{ID: "x"}); return err },
		"once": func(c *Client) error { return c.Signal(ctx, "x", "SIGINT") },
		"follow": func(c *Client) error {
			_, err := c.Log(ctx, "x", LogQuery{Follow: true})
			return err
		},
	}
	problem := `{"code":"conflict","detail":"no\nway","next":"ask ` + strings.Repeat("x", 10000) + `","facts":{"a":"b"}}`
	cases := map[string]struct {
		serve    func(net.Conn)
		ask, do  errdefs.Code
		answered bool
	}{
		"hangs up at once":     {func(net.Conn) {}, errdefs.Unavailable, errdefs.Indeterminate, false},
		"hangs up after all":   {says(""), errdefs.Unavailable, errdefs.Indeterminate, false},
		"talks nonsense":       {says("hello\r\n\r\n"), errdefs.Unavailable, errdefs.Indeterminate, false},
		"is something else":    {says(head("404 Not Found", "text/html") + "<h1>"), errdefs.Unavailable, errdefs.Indeterminate, false},
		"redirects":            {says("HTTP/1.1 302 Found\r\nLocation: http://example.org/\r\nContent-Length: 0\r\n\r\n"), errdefs.Unavailable, errdefs.Indeterminate, false},
		"not JSON":             {says(head("200 OK", "application/json") + "{"), errdefs.Unavailable, errdefs.Indeterminate, false},
		"a problem":            {says(head("409 Conflict", api.ProblemType) + problem), errdefs.Conflict, errdefs.Conflict, true},
		"a problem of no kind": {says(head("409 Conflict", api.ProblemType) + `{"code":"funny"}`), errdefs.Internal, errdefs.Internal, true},
		"headers without end":  {says("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", 1<<20)), errdefs.Unavailable, errdefs.Indeterminate, false},
	}
	for name, c := range cases {
		for what, f := range ask {
			err := f(fake(t, c.serve))
			want := c.do
			if what == "ask" || what == "follow" {
				want = c.ask
			}
			if name == "not JSON" && what == "once" {
				continue // its answer has no body to read
			}
			if name == "hangs up at once" && errdefs.Is(err, errdefs.Unavailable) {
				continue // it was faster than the request: certainly not carried out
			}
			if !errdefs.Is(err, want) || errors.Is(err, ErrAnswered) != c.answered {
				t.Errorf("%s, %s: %v (%s), want %s", name, what, err, errdefs.CodeOf(err), want)
			}
			if err != nil && (strings.Contains(err.Error(), "\n") || len(err.Error()) > 3*maxText) {
				t.Errorf("%s, %s: an unbounded text: %d bytes", name, what, len(err.Error()))
			}
		}
	}
}

func TestClientBoundsWhatItReads(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	endless := func(header, piece string) func(net.Conn) {
		return func(c net.Conn) {
			_, _ = c.Read(make([]byte, 64<<10))
			_, _ = io.WriteString(c, header)
			for {
				if _, err := io.WriteString(c, piece); err != nil {
					return
				}
			}
		}
	}
	blanks := strings.Repeat(" ", 64<<10)
	c := fake(t, endless(head("200 OK", "application/json"), blanks))
	if _, err := c.Info(ctx); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("an endless answer: %v", err)
	}
	c = fake(t, endless(head("200 OK", "application/json")+"[", blanks))
	if _, err := c.Procs(ctx); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("an endless list: %v", err)
	}
	c = fake(t, endless(head("500 Internal Server Error", api.ProblemType), blanks))
	if _, err := c.Info(ctx); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("an endless problem: %v", err)
	}
	c = fake(t, endless(head("200 OK", "application/x-ndjson"), blanks))
	if err := c.Watch(ctx, func(wire.ProcState) {}); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("an endless line: %v", err)
	}
	c = fake(t, says(head("200 OK", "text/plain")+"log"))
	if _, err := c.Log(ctx, "x", LogQuery{}); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("a log of another type: %v", err)
	}
}

func TestClientEndsWithItsContext(t *testing.T) {
	t.Parallel()
	c := fake(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }) // never answers
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Procs(ctx); !errdefs.Is(err, errdefs.Unavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ask: %v", err)
	}
	ctx, cancel = context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Log(ctx, "x", LogQuery{Follow: true}); !errdefs.Is(err, errdefs.Unavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("follow: %v", err)
	}
	ctx, cancel = context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Start(ctx, wire.ProcSpec{ID: "x"}); !errdefs.Is(err, errdefs.Indeterminate) {
		t.Errorf("do: %v", err)
	}
}

// A dialer's own word about a missing host is kept, and nothing was carried out.
func TestClientKeepsTheDialersWord(t *testing.T) {
	t.Parallel()
	c := NewClient(func(context.Context) (net.Conn, error) {
		return nil, errdefs.New(errdefs.Unavailable, "the machine is off").WithNext("switch it on")
	}, 1)
	for _, err := range []error{
		func() error { _, err := c.Procs(context.Background()); return err }(),
		func() error { _, err := c.Start(context.Background(), wire.ProcSpec{ID: "x"}); return err }(),
		func() error { _, err := c.Log(context.Background(), "x", LogQuery{Follow: true}); return err }(),
	} {
		if !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "switch it on") || Refused(err) {
			t.Errorf("%v", err)
		}
	}
}

// A connection that the old host program left behind is not an error of the new one.
func TestClientForgetsDeadConnections(t *testing.T) {
	t.Parallel()
	n := 0
	c := fake(t, func(c net.Conn) {
		n++
		buf := make([]byte, 64<<10)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 204 No Content\r\n\r\n")
			if n < 4 {
				return // hangs up, although it said it would stay
			}
		}
	})
	for range 5 {
		if err := c.SetLease(context.Background(), time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	if Refused(nil) || Refused(http.ErrAbortHandler) {
		t.Error("refused")
	}
}
