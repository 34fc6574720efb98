package worker

import (
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/oci"
)

type proxyRig struct {
	proxy *indexProxy
	at    string
}

func newProxyRig(t *testing.T, urls ...string) proxyRig {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hosts := map[string]bool{}
	for _, s := range urls {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		hosts[authority(u)] = true
	}
	p := serveIndex(l, hosts, slog.New(slog.DiscardHandler))
	t.Cleanup(p.close)
	return proxyRig{p, l.Addr().String()}
}

func TestSlots(t *testing.T) {
	t.Parallel()
	var s slots
	a, err := s.take("a", -1)
	if err != nil {
		t.Fatal(err)
	}
	if again, _ := s.take("a", -1); again == a {
		t.Error("the same slot twice")
	}
	s.free(a)
	if again, _ := s.take("a", -1); again != a {
		t.Error("a name does not get its slot again")
	}
	if own, _ := s.take("b", 17); own != 17 {
		t.Errorf("%d", own)
	}
	if other, _ := s.take("c", 17); other == 17 {
		t.Error("the same slot twice")
	}
	for err == nil {
		_, err = s.take("x", -1)
	}
	if !errdefs.Is(err, errdefs.Exhausted) || len(s.used) != maxSlots {
		t.Errorf("%v after %d", err, len(s.used))
	}
	for _, n := range []slot{0, 1, maxSlots - 1} {
		if slotOf(uint32(n.agent())) != n {
			t.Errorf("%d is not its own", n)
		}
	}
	for _, uid := range []uint32{0, 1000, firstUID, firstUID + 1, firstUID - oci.IDRange + oci.AgentID, 0x70000000 + oci.AgentID} {
		if n := slotOf(uid); n >= 0 {
			t.Errorf("%d is of slot %d", uid, n)
		}
	}
}

func TestMountPoint(t *testing.T) {
	t.Parallel()
	need.Root(t)
	dir, out := t.TempDir(), t.TempDir()
	if err := mountPoint(dir, "a/b", 4711); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(dir, "a/b"), &st); err != nil || st.Uid != 4711 {
		t.Errorf("%d, %v", st.Uid, err)
	}
	if err := os.Symlink(out, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := mountPoint(dir, "link/x", 4711); err == nil {
		t.Error("a link was followed")
	}
	if ents, _ := os.ReadDir(out); len(ents) > 0 {
		t.Error("something was made outside")
	}
	if err := giveTree(t.Context(), filepath.Join(dir, "link"), 4711); err == nil {
		t.Error("a link was given away")
	}
	if err := giveTree(t.Context(), dir, 4711); err != nil {
		t.Fatal(err)
	}
	if err := unix.Lstat(out, &st); err != nil || st.Uid == 4711 {
		t.Errorf("what a link points to was given away: %v", err)
	}
	if err := unix.Lstat(dir, &st); err != nil || st.Uid != 4711 || st.Mode&0o777 != 0o700 {
		t.Errorf("%d %o", st.Uid, st.Mode)
	}
}

// Counterpart of WL-06: an interpreter that a box cannot or should not show.
func TestShownDirs(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	venv := filepath.Join(base, "venv")
	mkdirs(t, venv, "bin", "lib/site")
	if err := os.Symlink("/usr/bin/env", filepath.Join(venv, "bin", "python")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(base, "elsewhere"), filepath.Join(venv, "bin", "away")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("loop", filepath.Join(venv, "bin", "loop")); err != nil {
		t.Fatal(err)
	}
	good := Interpreter{Path: filepath.Join(venv, "bin", "python"), Prefix: venv, BasePrefix: "/usr", ImportRoot: filepath.Join(venv, "lib", "site")}
	data := filepath.Join(base, "data")
	shown, err := shownDirs(good, data)
	if err != nil || len(shown) != 1 || shown[0] != venv {
		t.Errorf("%v, %v", shown, err)
	}
	for name, c := range map[string]struct {
		change func(*Interpreter)
		data   string
		word   string
	}{
		"outside":      {func(i *Interpreter) { i.Path = filepath.Join(base, "python") }, data, "outside of its own prefix"},
		"link outside": {func(i *Interpreter) { i.Path = filepath.Join(venv, "bin", "away") }, data, "outside of its own prefix"},
		"loop":         {func(i *Interpreter) { i.Path = filepath.Join(venv, "bin", "loop") }, data, "links"},
		"missing":      {func(i *Interpreter) { i.Path = filepath.Join(venv, "bin", "none") }, data, "cannot be found"},
		"no prefix":    {func(i *Interpreter) { i.Prefix = filepath.Join(base, "none") }, data, "cannot be found"},
		"root":         {func(i *Interpreter) { i.Prefix = "/" }, data, "cannot be shown"},
		"all homes":    {func(i *Interpreter) { i.Prefix = "/home" }, data, "more than an interpreter"},
		"reserved":     {func(i *Interpreter) { i.Prefix = "/etc/ssl/.." }, data, ""},
		"data inside":  {func(*Interpreter) {}, filepath.Join(venv, "data"), "one in the other"},
		"inside data":  {func(*Interpreter) {}, base, "one in the other"},
	} {
		i := good
		c.change(&i)
		i.Prefix = filepath.Clean(i.Prefix)
		if shown, err := shownDirs(i, c.data); err == nil || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s: %v, %v", name, shown, err)
		}
	}
}

func TestNames(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"inst-a", "../../etc", "a:b/c", strings.Repeat("x", 300), "ü", "install"} {
		id := newID(name)
		if len(id) > 64 || strings.Trim(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" {
			t.Errorf("%q", id)
		}
	}
	var said tail
	for range 3 {
		said.Write([]byte(strings.Repeat("a", outputTail)))
	}
	said.Write([]byte("the end"))
	if s := said.String(); len(s) != outputTail || !strings.HasSuffix(s, "the end") {
		t.Errorf("%d bytes", len(s))
	}
}
