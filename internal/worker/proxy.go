package worker

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// DefaultIndexHosts are the hosts an installer may reach where none are
// configured: the public Python package index, and where it keeps its files.
func DefaultIndexHosts() []string { return []string{"pypi.org", "files.pythonhosted.org"} }

const (
	// maxTunnels bounds the connections of one installer; pip and uv use up to 50.
	maxTunnels = 64
	// dialTime bounds the way to an index, and how long a request may take to arrive.
	dialTime = 30 * time.Second
	// idleTime is how long a connection without a request is kept.
	idleTime = 2 * time.Minute
)

// publicIndex is where an installer looks that was told no index.
const publicIndex = "https://pypi.org/simple"

// indexHosts returns what an installer may reach, as HOST:PORT in lower case.
func indexHosts(index string, more []string) (map[string]bool, error) {
	if index == "" {
		index = publicIndex
	}
	u, err := url.Parse(index)
	if err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" {
		// Not repeated: it may hold a password.
		return nil, errdefs.New(errdefs.Invalid, "the URL of the package index is no http or https URL").
			WithNext("give it as https://HOST/simple")
	}
	hosts := map[string]bool{authority(u): true}
	for _, h := range more {
		host, ports := strings.Trim(h, "[]"), []string{"80", "443"}
		if at, port, err := net.SplitHostPort(h); err == nil {
			host, ports = at, []string{port}
		}
		if _, err := strconv.ParseUint(ports[0], 10, 16); err != nil || host == "" || strings.ContainsAny(host, "/@ ") {
			return nil, errdefs.New(errdefs.Invalid, "the host %q for installers must be HOST or HOST:PORT", h)
		}
		for _, port := range ports {
			hosts[strings.ToLower(net.JoinHostPort(host, port))] = true
		}
	}
	return hosts, nil
}

// authority is the host and port of a URL, in lower case.
func authority(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "443"
		if u.Scheme == "http" {
			port = "80"
		}
	}
	return strings.ToLower(net.JoinHostPort(u.Hostname(), port))
}

// indexProxy is the way of one installer to the package index: an HTTP proxy that
// knows a few hosts and no others. Where this program's environment names a proxy
// itself, it is used.
type indexProxy struct {
	hosts  map[string]bool
	log    *slog.Logger
	server *http.Server
	plain  *httputil.ReverseProxy
	outer  func(*http.Request) (*url.URL, error)
	ctx    context.Context // ends the tunnels
	cancel context.CancelFunc
	slots  chan struct{}
	body   time.Duration  // dialTime, but in tests
	wg     sync.WaitGroup // one per tunnel, and one for the server
}

func serveIndex(l net.Listener, hosts map[string]bool, log *slog.Logger) *indexProxy {
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: dialTime}).DialContext,
		ResponseHeaderTimeout: time.Minute, DisableCompression: true, MaxConnsPerHost: maxTunnels}
	p := &indexProxy{hosts: hosts, log: log, outer: http.ProxyFromEnvironment, slots: make(chan struct{}, maxTunnels), body: dialTime}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	quiet := slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	p.plain = &httputil.ReverseProxy{
		Transport: transport, ErrorLog: quiet,
		Rewrite: func(r *httputil.ProxyRequest) { r.Out.Host = r.In.URL.Host },
	}
	p.server = &http.Server{Handler: p, ReadHeaderTimeout: dialTime, IdleTimeout: idleTime, MaxHeaderBytes: 64 << 10, ErrorLog: quiet}
	p.wg.Go(func() {
		_ = p.server.Serve(l)
		transport.CloseIdleConnections()
	})
	return p
}

// close ends what is going on and returns when nothing is.
func (p *indexProxy) close() {
	p.cancel()
	_ = p.server.Close()
	p.wg.Wait()
}

// ServeHTTP passes on what goes to a known host.
func (p *indexProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		// Installers only fetch. The server reads the body of a refused request before
		// the answer goes out, and by itself waits for it as long as it takes.
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(p.body))
		http.Error(w, "a request to the package index has no body", http.StatusBadRequest)
		return
	}
	connect := r.Method == http.MethodConnect
	to := strings.ToLower(r.Host)
	if !connect {
		if r.URL.Scheme != "http" || r.URL.Host == "" {
			http.Error(w, "this is a proxy", http.StatusBadRequest)
			return
		}
		to = authority(r.URL)
	}
	if !p.hosts[to] {
		p.log.Warn("an installer asked for a host that it may not reach", "host", to[:min(len(to), 256)], "known", slices.Sorted(maps.Keys(p.hosts)))
		http.Error(w, "this host is not one of the package index's", http.StatusForbidden)
		return
	}
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	default:
		http.Error(w, "too many connections at once", http.StatusServiceUnavailable)
		return
	}
	if !connect {
		p.plain.ServeHTTP(w, r)
		return
	}
	p.wg.Add(1) // the server does not wait for a connection that was taken from it
	defer p.wg.Done()
	p.tunnel(w, to)
}

// tunnel joins the client with a host until either ends.
func (p *indexProxy) tunnel(w http.ResponseWriter, to string) {
	there, err := p.dial(to)
	if err != nil {
		p.log.Warn("an installer's way to the package index is blocked", "host", to, "error", err)
		http.Error(w, "the package index cannot be reached", http.StatusBadGateway)
		return
	}
	defer there.Close()
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer here.Close()
	stop := context.AfterFunc(p.ctx, func() {
		here.Close()
		there.Close()
	})
	defer stop()
	if _, err := io.WriteString(here, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = io.Copy(there, buffered)
		closeWrite(there)
	})
	_, _ = io.Copy(here, there)
	here.Close() // the other direction has nobody to answer any more
	wg.Wait()
}

func closeWrite(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
	}
}

// dial connects to a known host, through the proxy of this program's environment
// if there is one.
func (p *indexProxy) dial(to string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(p.ctx, dialTime)
	defer cancel()
	d := &net.Dialer{}
	via, err := p.outer(&http.Request{URL: &url.URL{Scheme: "https", Host: to}})
	if err != nil {
		return nil, err
	}
	if via == nil || via.Scheme != "http" {
		return d.DialContext(ctx, "tcp", to)
	}
	c, err := d.DialContext(ctx, "tcp", authority(via))
	if err != nil {
		return nil, err
	}
	if c, err = connectThrough(ctx, c, via, to); err != nil {
		return nil, err
	}
	return c, nil
}

// connectThrough asks the proxy at the other end of c for a tunnel.
func connectThrough(ctx context.Context, c net.Conn, via *url.URL, to string) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	r := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: to}, Host: to, Header: http.Header{}}
	if u := via.User; u != nil {
		password, _ := u.Password()
		r.Header.Set("Proxy-Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(u.Username()+":"+password)))
	}
	err := r.Write(c)
	// Until it has answered the other side of the tunnel says nothing.
	if err == nil {
		var resp *http.Response
		if resp, err = http.ReadResponse(bufio.NewReader(c), r); err == nil && resp.StatusCode != http.StatusOK {
			err = errors.New("the proxy of this program's environment refused: " + resp.Status)
		}
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}
