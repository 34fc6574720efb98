package relay

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// rawPeer is a daemon that costs next to nothing: it writes frames that were made
// before, many at a time, so that a benchmark measures the hub.
type rawPeer struct {
	nc net.Conn
	br *bufio.Reader
}

// masked is one text message with a mask of zeros, which is a mask.
func masked(dst, p []byte) []byte {
	dst = append(dst, 0x81)
	switch n := len(p); {
	case n < 126:
		dst = append(dst, 0x80|byte(n))
	case n < 1<<16:
		dst = binary.BigEndian.AppendUint16(append(dst, 0x80|126), uint16(n))
	default:
		dst = binary.BigEndian.AppendUint64(append(dst, 0x80|127), uint64(n))
	}
	return append(append(dst, 1, 2, 3, 4), mask4(p)...)
}

func mask4(p []byte) []byte {
	out := make([]byte, len(p))
	for i, c := range p {
		out[i] = c ^ byte(i%4+1)
	}
	return out
}

func rawConnect(t testing.TB, url, id string) *rawPeer {
	t.Helper()
	p := rawUpgrade(t, url)
	p.hello(t, id)
	return p
}

func (p *rawPeer) hello(t testing.TB, id string) {
	p.send(t, relaywire.Frame{Type: relaywire.Hello, DaemonID: id, Protocol: relaywire.Protocol, Token: token})
	p.recv(t)
}

func rawUpgrade(t testing.TB, url string) *rawPeer {
	t.Helper()
	addr := strings.TrimPrefix(url, "ws://")
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	var key [16]byte
	_, _ = rand.Read(key[:])
	fmt.Fprintf(nc, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n",
		addr, base64.StdEncoding.EncodeToString(key[:]))
	p := &rawPeer{nc: nc, br: bufio.NewReaderSize(nc, 512)}
	res, err := http.ReadResponse(p.br, nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("no upgrade: %v %v", res, err)
	}
	return p
}

func (p *rawPeer) send(t testing.TB, f relaywire.Frame) {
	if _, err := p.nc.Write(masked(nil, relaywire.Append(nil, &f))); err != nil {
		t.Error(err)
	}
}

func (p *rawPeer) recv(t testing.TB) relaywire.Frame {
	f, err := p.next()
	if err != nil {
		t.Error(err)
	}
	return f
}

func (p *rawPeer) next() (relaywire.Frame, error) {
	for {
		var head [2]byte
		if _, err := io.ReadFull(p.br, head[:]); err != nil {
			return relaywire.Frame{}, err
		}
		n := int(head[1])
		switch n {
		case 126:
			var b [2]byte
			if _, err := io.ReadFull(p.br, b[:]); err != nil {
				return relaywire.Frame{}, err
			}
			n = int(binary.BigEndian.Uint16(b[:]))
		case 127:
			return relaywire.Frame{}, errors.New("too long for a benchmark")
		}
		b := make([]byte, n)
		if _, err := io.ReadFull(p.br, b); err != nil {
			return relaywire.Frame{}, err
		}
		if head[0]&0x0f == 1 {
			return relaywire.Decode(b, 0)
		}
	}
}

func eventOf(size int) json.RawMessage {
	e := `{"type":"message.delta","data":{"chunk":{"role":"assistant","content":"` // as a daemon would say it
	end := `"}}}`
	return json.RawMessage(e + strings.Repeat("x", max(0, size-len(e)-len(end))) + end)
}

// flood writes n events of a job, then run.finished.
func (p *rawPeer) flood(job string, event json.RawMessage, n int) error {
	one := masked(nil, relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Event, JobID: job, Event: event}))
	per := max(1, min(n, 256<<10/len(one)))
	block := []byte(strings.Repeat(string(one), per))
	for n > 0 {
		k := min(n, per)
		if _, err := p.nc.Write(block[:k*len(one)]); err != nil {
			return err
		}
		n -= k
	}
	_, err := p.nc.Write(masked(nil, relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Finished, JobID: job})))
	return err
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkEvents(b *testing.B) {
	for _, daemons := range []int{1, 100} {
		for _, size := range []int{200, 16 << 10} {
			b.Run(fmt.Sprintf("daemons=%d/size=%d", daemons, size), func(b *testing.B) {
				h, url := newHub(b, nil)
				peers := make([]*rawPeer, daemons)
				jobs := make([]*Job, daemons)
				for i := range peers {
					id := "d" + strconv.Itoa(i)
					peers[i] = rawConnect(b, url, id)
					j, err := h.RunJob(context.Background(), JobRequest{DaemonID: id, Payload: json.RawMessage(`{}`)})
					if err != nil {
						b.Fatal(err)
					}
					peers[i].recv(b)
					jobs[i] = j
				}
				each := (b.N + daemons - 1) / daemons
				b.SetBytes(int64(size))
				b.ResetTimer()
				start, before := time.Now(), cpu()
				ends := make([]time.Duration, daemons)
				var wg sync.WaitGroup
				for i := range peers {
					wg.Go(func() {
						if err := peers[i].flood(jobs[i].ID(), eventOf(size), each); err != nil {
							b.Error(err)
						}
					})
					wg.Go(func() {
						n := 0
						err := jobs[i].Stream(context.Background(), func(events []json.RawMessage) error {
							n += len(events)
							return nil
						})
						if err != nil {
							b.Error(err)
						}
						if n != each {
							b.Errorf("got %d events of %d", n, each)
						}
						ends[i] = time.Since(start)
					})
				}
				wg.Wait()
				took := time.Since(start)
				b.StopTimer()
				first := took
				for _, e := range ends {
					first = min(first, e)
				}
				b.ReportMetric(float64(each*daemons)/took.Seconds(), "events/s")
				b.ReportMetric(float64((cpu()-before).Nanoseconds())/float64(each*daemons), "cpu-ns/event")
				b.ReportMetric(float64(first)/float64(took), "first/last")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// beside runs f while another daemon floods one job.
func beside(b *testing.B, flooding bool, f func(h *Hub, url string)) {
	h, url := newHub(b, nil)
	if flooding {
		p := rawConnect(b, url, "flood")
		j, err := h.RunJob(context.Background(), JobRequest{DaemonID: "flood", Payload: json.RawMessage(`{}`)})
		if err != nil {
			b.Fatal(err)
		}
		p.recv(b)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = j.Stream(context.Background(), func([]json.RawMessage) error { return nil })
		}()
		go func() { _ = p.flood(j.ID(), eventOf(200), 1<<40) }()
		defer func() { p.nc.Close(); <-done }()
	}
	f(h, url)
}

// report says what a middle and a late one of some times was.
func report(b *testing.B, what string, times []time.Duration) {
	slices.Sort(times)
	for _, p := range []int{50, 99} {
		b.ReportMetric(float64(times[len(times)*p/100].Nanoseconds())/1e3, fmt.Sprintf("%s-p%d-µs", what, p))
	}
}

func BenchmarkHello(b *testing.B) {
	for _, flooding := range []bool{false, true} {
		b.Run(fmt.Sprintf("flood=%v", flooding), func(b *testing.B) {
			beside(b, flooding, func(_ *Hub, url string) {
				var times []time.Duration
				for b.Loop() {
					p := rawUpgrade(b, url)
					start := time.Now()
					p.hello(b, "d"+strconv.Itoa(len(times)))
					times = append(times, time.Since(start))
					p.nc.Close()
				}
				report(b, "hello", times)
			})
		})
	}
}

func BenchmarkCancel(b *testing.B) {
	for _, flooding := range []bool{false, true} {
		b.Run(fmt.Sprintf("flood=%v", flooding), func(b *testing.B) {
			beside(b, flooding, func(h *Hub, url string) {
				p := rawConnect(b, url, "d")
				started := make(chan struct{})
				go func() {
					for {
						f, err := p.next()
						if err != nil {
							return
						}
						if f.Type == relaywire.Start {
							started <- struct{}{}
						}
						if f.Type == relaywire.Cancel {
							p.send(b, relaywire.Frame{Type: relaywire.Finished, JobID: f.JobID})
						}
					}
				}()
				var times []time.Duration
				for b.Loop() {
					j, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
					if err != nil {
						b.Fatal(err)
					}
					<-started
					start := time.Now()
					if o, _ := j.Cancel(context.Background(), "bench"); !o.Acknowledged {
						b.Fatal("not acknowledged")
					}
					times = append(times, time.Since(start))
				}
				report(b, "cancel", times)
			})
		})
	}
}

func BenchmarkEmptyJobs(b *testing.B) {
	for _, durable := range []bool{false, true} {
		b.Run(fmt.Sprintf("durable=%v", durable), func(b *testing.B) {
			h, url := newHub(b, func(c *HubConfig) {
				if durable {
					c.StateDir = b.TempDir()
				}
			})
			p := rawConnect(b, url, "d")
			go func() {
				for {
					f, err := p.next()
					if err != nil {
						return
					}
					p.send(b, relaywire.Frame{Type: relaywire.Finished, JobID: f.JobID})
				}
			}()
			for b.Loop() {
				j, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
				if err != nil {
					b.Fatal(err)
				}
				if _, err := j.Next(context.Background()); err != io.EOF {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "jobs/s")
		})
	}
}

// anonymous is the anonymous memory of this process in bytes.
func anonymous(t testing.TB) int64 {
	raw, err := os.ReadFile("/proc/self/smaps_rollup")
	if err != nil {
		t.Skip(err)
	}
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "Anonymous:" {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n << 10
		}
	}
	return 0
}

// BenchmarkIdle is the anonymous memory of a hub per silent daemon. The daemons are
// this process too, so half a daemon here is a bare socket.
func BenchmarkIdle(b *testing.B) {
	const daemons = 5000
	for b.Loop() {
		_, url := newHub(b, func(c *HubConfig) { c.Limits.Daemons = daemons + 1; c.Limits.PingInterval = -1 })
		rawConnect(b, url, "first")
		runtime.GC()
		debug.FreeOSMemory()
		before := anonymous(b)
		fds := make([]int, 0, daemons)
		for i := range daemons {
			fds = append(fds, bareConnect(b, url, i))
		}
		after := anonymous(b)
		runtime.GC()
		debug.FreeOSMemory()
		b.ReportMetric(float64(after-before)/daemons/1024, "KiB/daemon")
		b.ReportMetric(float64(anonymous(b)-before)/daemons/1024, "KiB/daemon-after-gc")
		for _, fd := range fds {
			_ = syscall.Close(fd)
		}
	}
}

// bareConnect connects a daemon through a socket that costs this process nothing.
func bareConnect(t testing.TB, url string, i int) int {
	_, port, err := net.SplitHostPort(strings.TrimPrefix(url, "ws://"))
	if err != nil {
		t.Fatal(err)
	}
	n, _ := strconv.Atoi(port)
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Connect(fd, &syscall.SockaddrInet4{Port: n, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	hello := relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Hello, DaemonID: "idle" + strconv.Itoa(i),
		Protocol: relaywire.Protocol, Token: token, Metadata: json.RawMessage(`{"pid":1,"cwd":"/home/user","platform":"linux"}`)})
	say := func(b []byte) {
		if _, err := syscall.Write(fd, b); err != nil {
			t.Fatal(err)
		}
	}
	buf := make([]byte, 4096)
	hear := func(what string) {
		n, err := syscall.Read(fd, buf)
		if err != nil || !strings.Contains(string(buf[:n]), what) {
			t.Fatalf("got %q, %v", buf[:n], err)
		}
	}
	say([]byte("GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"))
	hear("101 ")
	say(masked(nil, hello))
	hear("daemon.ready")
	return fd
}

// BenchmarkCancelSameDaemon cancels one job of a daemon that floods another one over
// the same connection: the acknowledgement stands behind what is in the socket.
func BenchmarkCancelSameDaemon(b *testing.B) {
	h, url := newHub(b, nil)
	p := rawConnect(b, url, "d")
	flood, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
	if err != nil {
		b.Fatal(err)
	}
	p.recv(b)
	go func() { _ = flood.Stream(context.Background(), func([]json.RawMessage) error { return nil }) }()
	// As our client does it: what was written and not sent is little.
	if err := p.nc.(*net.TCPConn).SetWriteBuffer(64 << 10); err != nil {
		b.Fatal(err)
	}
	first := make(chan string, 1) // jobs to acknowledge before the flood goes on
	one := masked(nil, relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Event, JobID: flood.ID(), Event: eventOf(200)}))
	block := []byte(strings.Repeat(string(one), 32))
	go func() {
		for {
			select {
			case job := <-first:
				p.send(b, relaywire.Frame{Type: relaywire.Finished, JobID: job})
			default:
				if _, err := p.nc.Write(block); err != nil {
					return
				}
			}
		}
	}()
	started := make(chan struct{})
	go func() {
		for {
			f, err := p.next()
			if err != nil {
				return
			}
			switch f.Type {
			case relaywire.Start:
				started <- struct{}{}
			case relaywire.Cancel:
				first <- f.JobID
			}
		}
	}()
	var times []time.Duration
	for b.Loop() {
		j, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
		if err != nil {
			b.Fatal(err)
		}
		<-started
		start := time.Now()
		if o, _ := j.Cancel(context.Background(), "bench"); !o.Acknowledged {
			b.Fatal("not acknowledged")
		}
		times = append(times, time.Since(start))
	}
	report(b, "cancel", times)
	p.nc.Close()
}

// BenchmarkStalledConsumer sends 500 MiB to a job that nobody reads, beside another job
// of the same daemon, and reports the anonymous memory that took.
func BenchmarkStalledConsumer(b *testing.B) {
	const size, events = 16 << 10, 500 << 20 / (16 << 10)
	for b.Loop() {
		h, url := newHub(b, nil)
		p := rawConnect(b, url, "d")
		for range 2 {
			if _, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)}); err != nil {
				b.Fatal(err)
			}
			p.recv(b)
		}
		j := h.jobs[h.Jobs()[0].ID]
		before := anonymous(b)
		if err := p.flood(j.ID(), eventOf(size), events); err != nil {
			b.Fatal(err)
		}
		<-j.Done()
		b.ReportMetric(float64(anonymous(b)-before)/(1<<20), "MiB-grown")
		n := 0
		err := j.Stream(context.Background(), func(e []json.RawMessage) error { n += len(e); return nil })
		if err != nil || n != events {
			b.Errorf("%d events of %d came out: %v", n, events, err)
		}
	}
}
