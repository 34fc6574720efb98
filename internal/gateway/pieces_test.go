package gateway

import (
	"errors"
	"io"
	"net"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// What passes cleanPath stays below any base it is put behind, also for a server
// that decodes twice, takes backslashes for slashes or cuts parameters off.
func FuzzCleanPath(f *testing.F) {
	for _, s := range []string{"/", "/v1/messages", "/v1/models/a:b", "/%2e%2e/x", "/a//b", "/..;x", "/%25", "/a%2Fb", `/a\b`, "/;x", "/...", "x", "/%zz", "/é"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		decoded, err := cleanPath(s)
		if err != nil {
			return
		}
		u := url.URL{Scheme: "http", Host: "h", Path: "/base" + decoded, RawPath: "/base" + s}
		again := strings.ReplaceAll(decoded, `\`, "/")
		if twice, err := url.PathUnescape(again); err != nil || twice != again {
			t.Fatalf("%q decodes further, from %q to %q", s, again, twice)
		}
		for seg := range strings.SplitSeq(again[1:], "/") {
			seg, _, _ = strings.Cut(seg, ";")
			if seg == "." || seg == ".." {
				t.Fatalf("%q holds a dot segment", s)
			}
		}
		joined := (&url.URL{Scheme: "http", Host: "h"}).ResolveReference(&url.URL{Path: u.Path})
		if joined.Host != "h" || !strings.HasPrefix(joined.Path, "/base/") {
			t.Fatalf("%q leads to %s", s, joined)
		}
	})
}

func TestSplitRoute(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in, name, rest string
		ok, bad        bool
	}{
		{"/model/p", "p", "", true, false},
		{"/model/p/", "p", "/", true, false},
		{"/model/p/v1/x", "p", "/v1/x", true, false},
		{"/model//x", "", "/x", true, false},
		{"/model/p/../x", "", "", true, true},
		{"/models/p", "", "", false, false},
		{"", "", "", false, false},
	} {
		name, _, rest, ok, err := splitRoute(c.in)
		if name != c.name || rest != c.rest || ok != c.ok || (err != nil) != c.bad {
			t.Errorf("%q: %q %q %v %v", c.in, name, rest, ok, err)
		}
	}
}

// However the input is cut up, the output is the input with the key overwritten.
func TestRedactor(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		key := rapid.SampledFrom([]string{"k", "aab", "abab", "sk-abc"}).Draw(t, "key")
		parts := rapid.SliceOf(rapid.OneOf(rapid.Just(key), rapid.Just(key[:len(key)-1]), rapid.StringOf(rapid.RuneFrom([]rune("abks-c\n"))))).Draw(t, "parts")
		in := strings.Join(parts, "")
		want := strings.ReplaceAll(in, key, strings.Repeat("*", len(key)))
		var src io.Reader = &chunks{parts: parts}
		if rapid.Bool().Draw(t, "bytewise") {
			src = iotest.OneByteReader(strings.NewReader(in))
		}
		r := newRedactor(src, key)
		var out strings.Builder
		buf := make([]byte, rapid.IntRange(1, 9).Draw(t, "buf"))
		for {
			n, err := r.Read(buf)
			out.Write(buf[:n])
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if out.String() != want {
			t.Fatalf("%q became %q, want %q", in, out.String(), want)
		}
	})
}

// chunks gives out its parts one at a time, as far as they fit.
type chunks struct{ parts []string }

func (c *chunks) Read(p []byte) (int, error) {
	if len(c.parts) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.parts[0])
	if c.parts[0] = c.parts[0][n:]; c.parts[0] == "" {
		c.parts = c.parts[1:]
	}
	return n, nil
}

func TestWatchdog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var fired atomic.Int32
		w := newWatchdog(time.Minute, func() { fired.Add(1) })
		for range 10 {
			time.Sleep(50 * time.Second)
			w.moved()
		}
		synctest.Wait()
		if fired.Load() != 0 {
			t.Fatal("it fired although something moved")
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		w.moved()
		time.Sleep(time.Hour)
		synctest.Wait()
		if fired.Load() != 1 {
			t.Fatalf("fired %d times", fired.Load())
		}
		w = newWatchdog(time.Minute, func() { fired.Add(1) })
		w.stop()
		w.moved()
		time.Sleep(time.Hour)
		synctest.Wait()
		if fired.Load() != 1 {
			t.Fatal("it fired after stop")
		}
	})
}

// pipes is a listener to whom somebody always connects.
type pipes struct{ net.Listener }

func (pipes) Accept() (net.Conn, error) { c, _ := net.Pipe(); return c, nil }
func (pipes) Close() error              { return nil }

func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLimitListener(pipes{}, 2)
		first, _ := l.Accept()
		if _, err := l.Accept(); err != nil {
			t.Fatal(err)
		}
		accepted := make(chan error, 2)
		accept := func() { _, err := l.Accept(); accepted <- err }
		go accept()
		synctest.Wait()
		if len(accepted) != 0 {
			t.Fatal("a third connection was accepted")
		}
		first.Close()
		first.Close() // frees its slot once
		if err := <-accepted; err != nil {
			t.Fatal(err)
		}
		go accept()
		synctest.Wait()
		if len(accepted) != 0 {
			t.Fatal("a connection freed two slots")
		}
		l.Close()
		if err := <-accepted; !errors.Is(err, net.ErrClosed) {
			t.Fatalf("accept on a closed listener: %v", err)
		}
	})
}
