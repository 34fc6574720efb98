package worker

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

// wheel is a distribution with one module, as the package index has it.
func wheel(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, f := range [][2]string{
		{"toydep.py", "answer = 42\n"},
		{"toydep-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toydep\nVersion: 1.0\n"},
		{"toydep-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"toydep-1.0.dist-info/RECORD", "toydep.py,,\ntoydep-1.0.dist-info/METADATA,,\ntoydep-1.0.dist-info/WHEEL,,\ntoydep-1.0.dist-info/RECORD,,\n"},
	} {
		w, err := z.Create(f[0])
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, f[1])
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// index is a package index on this machine, with user and password.
func index(t testing.TB) string {
	t.Helper()
	whl := wheel(t)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); u != "reader" || p != "hunter2hunter2" {
			w.Header().Set("WWW-Authenticate", `Basic realm="index"`)
			http.Error(w, "who are you", http.StatusUnauthorized)
			return
		}
		switch r.URL.Path {
		case "/simple/toydep/":
			io.WriteString(w, `<!DOCTYPE html><html><body><a href="/files/toydep-1.0-py3-none-any.whl">toydep-1.0-py3-none-any.whl</a></body></html>`)
		case "/files/toydep-1.0-py3-none-any.whl":
			w.Write(whl)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return strings.Replace(s.URL, "http://", "http://reader:hunter2hunter2@", 1) + "/simple"
}

func installSpec(t testing.TB, r rig, i Interpreter, lines string) InstallSpec {
	t.Helper()
	dir := filepath.Join(r.dir, "environments", ".staging")
	mkdirs(t, dir, "site-packages", "scratch")
	req := filepath.Join(dir, "scratch", "requirements.txt")
	if err := os.WriteFile(req, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	return InstallSpec{Python: i.Path, Target: filepath.Join(dir, "site-packages"), Scratch: filepath.Join(dir, "scratch"), Requirements: req, Index: index(t)}
}

// Counterpart of WL-03, WL-14, WL-15: a requirement is installed from the index,
// in both ways; the tree is the runtime's afterwards; a failure says its code and
// no secret.
func TestInstall(t *testing.T) {
	t.Parallel()
	i := sdk(t, "0.7")
	for _, kind := range []string{"direct pip", "box pip", "direct uv", "box uv"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var r rig
			if strings.HasPrefix(kind, "box") {
				r = newBox(t, i, func(c *BoxConfig) { c.Policy.MaxOpenFiles = 1024 })
			} else {
				r = newDirect(t, i)
			}
			spec := installSpec(t, r, i, "toydep==1.0\n")
			if strings.HasSuffix(kind, "uv") {
				spec.Uv = need.UV(t)
			}
			if err := r.Install(t.Context(), spec); err != nil {
				t.Fatalf("%v: %s", err, outputOf(err))
			}
			b, err := os.ReadFile(filepath.Join(spec.Target, "toydep.py"))
			if err != nil || string(b) != "answer = 42\n" {
				t.Errorf("%q, %v", b, err)
			}
			err = filepath.WalkDir(spec.Target, func(p string, _ os.DirEntry, err error) error {
				var st unix.Stat_t
				if err == nil {
					err = unix.Lstat(p, &st)
				}
				if int(st.Uid) != os.Geteuid() {
					t.Errorf("%s belongs to %d", p, st.Uid)
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
			bad := spec
			if err := os.WriteFile(bad.Requirements, []byte("no-such-toy==9\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			err = r.Install(t.Context(), bad)
			e, ok := errors.AsType[*deptree.InstallError](err)
			if !ok || e.Exit <= 0 || strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "no-such-toy") {
				t.Errorf("%v", err)
			}
			if ok && !strings.Contains(e.Output, "no-such-toy") {
				t.Errorf("it said %q", e.Output)
			}
		})
	}
}

func outputOf(err error) string {
	if e, ok := errors.AsType[*deptree.InstallError](err); ok {
		return e.Output
	}
	return ""
}

// jailed runs a script of the test as the installer, in a box.
func jailed(t *testing.T, r rig, script string, more ...string) (string, error) {
	t.Helper()
	i := r.box.cfg.Interp
	fake := filepath.Join(i.ImportRoot, "langbot_plugin", "installer")
	need.Program(t, fake, "#!"+i.Path+"\n"+script)
	spec := installSpec(t, r, i, "x\n")
	spec.Uv = fake
	for _, m := range more {
		spec.Index = m
	}
	err := r.Install(t.Context(), spec)
	return outputOf(err), err
}

// TestInstallerJail: an installer writes to two directories and reaches the index
// alone.
func TestInstallerJail(t *testing.T) {
	t.Parallel()
	i := bare(t, "")
	r := newBox(t, i)
	secret := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "secret") }))
	defer secret.Close()
	out, err := jailed(t, r, fmt.Sprintf(`
import os, socket, sys, urllib.request
def can(p):
    try: open(p + "/probe", "w").close(); return True
    except OSError: return False
print("write", [d for d in ("/", "/tmp", "/dependency-env", "/usr", "/etc", "/home", "/opt") if can(d)])
print("plugin", os.path.exists("/plugin"), os.path.exists(%q))
print("net", sorted(l.split(":")[0].strip() for l in open("/proc/net/dev").readlines()[2:]))
host, port = %q.split(":")
try: socket.create_connection((host, int(port)), 5); print("direct yes")
except OSError: print("direct no")
def get(url, proxy=True):
    try: return urllib.request.urlopen(url, timeout=10).read()
    except urllib.error.HTTPError as e: return e.code
    except Exception as e: return type(e).__name__
print("proxied", get("http://" + host + ":" + port + "/"), get("https://" + host + ":" + port + "/"))
print("index", get(os.environ["UV_DEFAULT_INDEX"].replace("reader:hunter2hunter2@", "") + "/toydep/"))
print("env", sorted(k for k in os.environ if k.startswith("LANGBOT") or k.endswith("TOKEN")))
print("uid", os.getuid(), os.getcwd())
sys.exit(9)
`, r.dir, strings.TrimPrefix(secret.URL, "http://")))
	if e, ok := errors.AsType[*deptree.InstallError](err); !ok || e.Exit != 9 {
		t.Fatalf("%v", err)
	}
	for _, want := range []string{
		"write ['/tmp', '/dependency-env']", "plugin False False", "net ['lo']", "direct no", "proxied 403 URLError", "index 401", "env []", "uid 1000 /tmp",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

// Counterpart of WL-16, WL-17: who waits no longer ends the installer with all it
// has started, and so does closing the launcher, which waits until nothing is left.
func TestInstallerEnds(t *testing.T) {
	t.Parallel()
	i := bare(t, "")
	r := newBox(t, i)
	d := newDirect(t, i)
	fake := filepath.Join(i.ImportRoot, "langbot_plugin", "installer")
	script := "#!" + i.Path + "\nimport os,time\nif os.fork() == 0: os.setsid()\nopen(os.environ['TMPDIR'] + '/up', 'w').close()\ntime.sleep(600)\n"
	need.Program(t, fake, script)
	for name, l := range map[string]rig{"box": r, "direct": d} {
		t.Run(name, func(t *testing.T) {
			if name == "direct" {
				need.Root(t)
			}
			spec := installSpec(t, l, i, "x\n")
			spec.Uv = fake
			up := filepath.Join(spec.Scratch, "up")
			begin := func(ctx context.Context) chan error {
				t.Helper()
				os.Remove(up)
				ended := make(chan error, 1)
				go func() { ended <- l.Install(ctx, spec) }()
				for range 6000 {
					if _, err := os.Stat(up); err == nil {
						return ended
					}
					time.Sleep(5 * time.Millisecond)
				}
				t.Fatal("the installer did not start")
				return nil
			}
			ctx, cancel := context.WithCancelCause(t.Context())
			ended := begin(ctx)
			why := errors.New("nobody waits")
			cancel(why)
			if err := <-ended; !errors.Is(err, why) {
				t.Errorf("%v", err)
			}
			spec = installSpec(t, l, i, "x\n")
			spec.Uv = fake
			ended = begin(t.Context())
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			if n := len(l.live().installs); n != 0 {
				t.Errorf("%d installations under way after closing", n)
			}
			if err := <-ended; !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "closed") {
				t.Errorf("%v", err)
			}
			if err := l.Install(t.Context(), spec); !errdefs.Is(err, errdefs.Unavailable) {
				t.Errorf("an installation begins after closing: %v", err)
			}
		})
	}
}

func TestInstallRefuses(t *testing.T) {
	t.Parallel()
	r := newBox(t, bare(t, ""))
	good := installSpec(t, r, r.box.cfg.Interp, "")
	for name, change := range map[string]func(*InstallSpec){
		"relative":     func(s *InstallSpec) { s.Target = "x" },
		"outside":      func(s *InstallSpec) { s.Requirements = "/etc/passwd" },
		"beside":       func(s *InstallSpec) { s.Requirements = s.Scratch + "-other/r" },
		"index":        func(s *InstallSpec) { s.Index = "ftp://user:hunter2@host/" },
		"index broken": func(s *InstallSpec) { s.Index = "http://user:hunter2@host:x/" },
	} {
		spec := good
		change(&spec)
		if err := r.Install(t.Context(), spec); !errdefs.Is(err, errdefs.Invalid) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCertificates(t *testing.T) {
	dir, scratch := t.TempDir(), t.TempDir()
	ca, victim := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "victim")
	for _, f := range []string{ca, victim} {
		if err := os.WriteFile(f, []byte(f), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PIP_CERT", ca)
	t.Setenv("SSL_CERT_FILE", dir)
	t.Setenv("CURL_CA_BUNDLE", filepath.Join(dir, "none"))
	t.Setenv("REQUESTS_CA_BUNDLE", "")
	env, err := certificates(scratch)
	if err != nil || fmt.Sprint(env) != "[PIP_CERT=/tmp/pip_cert.pem]" {
		t.Errorf("%v, %v", env, err)
	}
	if b, err := os.ReadFile(filepath.Join(scratch, "pip_cert.pem")); err != nil || string(b) != ca {
		t.Errorf("%q, %v", b, err)
	}
	at := filepath.Join(scratch, "pip_cert.pem")
	if err := errors.Join(os.Remove(at), os.Symlink(victim, at)); err != nil {
		t.Fatal(err)
	}
	if env, err := certificates(scratch); err == nil {
		t.Errorf("a link was written through: %v", env)
	}
	if b, _ := os.ReadFile(victim); string(b) != victim {
		t.Errorf("%q", b)
	}
}

func TestIndexHosts(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		index string
		more  []string
		want  string
	}{
		{"", nil, "pypi.org:443"},
		{"https://Index.example/simple", nil, "index.example:443"},
		{"http://u:p@index.example/simple", nil, "index.example:80"},
		{"http://[::1]:8080/simple", nil, "[::1]:8080"},
		{"https://a/", []string{"Files.example", "b:8443", "[::1]"}, "[::1]:443 [::1]:80 a:443 b:8443 files.example:443 files.example:80"},
	} {
		got, err := indexHosts(c.index, c.more)
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for h := range got {
			all = append(all, h)
		}
		for _, w := range strings.Fields(c.want) {
			if !got[w] {
				t.Errorf("%v lacks %s", all, w)
			}
		}
		if len(all) != len(strings.Fields(c.want)) {
			t.Errorf("%v, want %s", all, c.want)
		}
	}
	for _, bad := range []string{"", "http://x", "a b", "u@h"} {
		if h, err := indexHosts("", []string{bad}); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%q: %v, %v", bad, h, err)
		}
	}
}

// A body that is announced and never sent, or a caller that asks nothing more, keeps no
// connection.
func TestProxyABodyThatNeverComes(t *testing.T) {
	t.Parallel()
	r := newProxyRig(t, "http://127.0.0.1:1")
	r.proxy.body = 20 * time.Millisecond
	for _, request := range []string{"GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\nContent-Length: 10", "CONNECT 127.0.0.1:2 HTTP/1.1\r\nHost: 127.0.0.1:2\r\nContent-Length: 10",
		"POST http://127.0.0.1:2/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked"} {
		conn, err := net.Dial("tcp", r.at)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second)) // instead of hanging
		fmt.Fprintf(conn, "%s\r\n\r\n", request)
		if b, err := io.ReadAll(conn); err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 400") {
			t.Errorf("%q: %q %v", request, b, err)
		}
	}
	if r.proxy.server.IdleTimeout <= 0 {
		t.Error("a connection without a request stays for ever")
	}
}

// TestProxy: the proxy joins a client with known hosts, also through another
// proxy, and leaves nothing behind when it is closed in the middle.
func TestProxy(t *testing.T) {
	t.Parallel()
	tls := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }))
	defer tls.Close()
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, r.Host+" "+r.URL.Path+" "+r.Header.Get("Proxy-Authorization"))
	}))
	defer plain.Close()
	r := newProxyRig(t, tls.URL, plain.URL)
	client := func(p *indexProxy, at string) *http.Client {
		tr := tls.Client().Transport.(*http.Transport).Clone()
		tr.Proxy = func(*http.Request) (*url.URL, error) { return url.Parse("http://" + at) }
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
	get := func(c *http.Client, at string) string {
		t.Helper()
		resp, err := c.Get(at)
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return fmt.Sprint(resp.StatusCode, " ", strings.TrimSpace(string(b)))
	}
	c := client(r.proxy, r.at)
	if s := get(c, tls.URL); s != "200 hello" {
		t.Error(s)
	}
	if s := get(c, plain.URL+"/simple/"); s != "200 "+strings.TrimPrefix(plain.URL, "http://")+" /simple/" {
		t.Error(s)
	}
	if s := get(c, "http://127.0.0.1:1/"); !strings.HasPrefix(s, "403") {
		t.Error(s)
	}
	if s := get(c, "https://127.0.0.1:1/"); !strings.Contains(s, "Forbidden") {
		t.Error(s)
	}
	if s := get(http.DefaultClient, "http://"+r.at+"/"); !strings.HasPrefix(s, "400") {
		t.Error(s)
	}
	// Through the first proxy as the outer one.
	outer := newProxyRig(t, tls.URL)
	outer.proxy.outer = func(*http.Request) (*url.URL, error) { return url.Parse("http://who:pass@" + r.at) }
	if s := get(client(outer.proxy, outer.at), tls.URL); s != "200 hello" {
		t.Error(s)
	}
	refused := newProxyRig(t, "https://127.0.0.1:1")
	refused.proxy.outer = outer.proxy.outer
	if s := get(client(refused.proxy, refused.at), "https://127.0.0.1:1"); !strings.Contains(s, "Bad Gateway") {
		t.Error(s)
	}
	http.DefaultClient.CloseIdleConnections()
	// A tunnel that is open when the proxy closes.
	conn, err := net.Dial("tcp", r.at)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	to := strings.TrimPrefix(tls.URL, "https://")
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", to, to)
	b := make([]byte, 64)
	if n, err := conn.Read(b); err != nil || !strings.HasPrefix(string(b[:n]), "HTTP/1.1 200") {
		t.Fatalf("%q, %v", b[:n], err)
	}
	r.proxy.close()
	if _, err := io.ReadAll(conn); err != nil && !errors.Is(err, unix.ECONNRESET) {
		t.Error(err)
	}
}
