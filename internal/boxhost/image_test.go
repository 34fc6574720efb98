package boxhost

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

// busyboxImage builds an image around the machine's static busybox.
func busyboxImage(t *testing.T, more ...entry) v1.Image {
	t.Helper()
	bin, err := os.ReadFile(need.Tool(t, "busybox", "busybox-static"))
	if err != nil {
		t.Fatal(err)
	}
	entries := []entry{
		{name: "opt/bin/", kind: tar.TypeDir, mode: 0o755}, {name: "opt/bin/busybox", content: string(bin), mode: 0o755},
		{name: "bin", kind: tar.TypeSymlink, link: "opt/bin"},
		{name: "etc/motd", content: "image"}, {name: "var/data", content: "data"}, {name: "home/other/f", content: "other"},
	}
	for _, applet := range []string{"sh", "ls", "cat", "id", "stat", "touch", "pwd", "grep"} {
		entries = append(entries, entry{name: "opt/bin/" + applet, kind: tar.TypeSymlink, link: "busybox"})
	}
	b := archive(t, append(entries, more...)...).Bytes()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", runtime.GOARCH
	cfg.Config.Env = []string{"PATH=/opt/bin"}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

func TestImageBoxes(t *testing.T) {
	t.Parallel()
	allowed := t.TempDir()
	writeFile(t, allowed+"/f", "mounted", 0o644)
	f := newFixture(t, func(c *Config) { c.AllowMounts = []string{allowed} })
	img := busyboxImage(t, entry{name: "etc/passwd", content: "root:x:0:0::/:/bin/sh"}, entry{name: "etc/hosts", kind: tar.TypeSymlink, link: "/nowhere"})
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(img); err != nil {
		t.Fatal(err)
	}
	var layoutTar bytes.Buffer
	w := tar.NewWriter(&layoutTar)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("busy:1")
	if err != nil {
		t.Fatal(err)
	}
	var saved bytes.Buffer
	if err := tarball.Write(tag, img, &saved); err != nil {
		t.Fatal(err)
	}
	for form, r := range map[string]io.Reader{"layout": &layoutTar, "saved": &saved} {
		infos, err := f.LoadImage(t.Context(), form, r)
		if err != nil || len(infos) != 1 {
			t.Fatalf("%s: %v, %v", form, infos, err)
		}
		id := f.put(func(s *wire.BoxSpec) {
			s.Image = infos[0].Digest
			s.Mounts = append(mount(allowed, "/var/deep/mount", false), mount(allowed, "/new", false)...)
		})
		out := f.sh(id, `id -un; echo $PATH; pwd; cat /etc/motd /var/data /home/other/f /var/deep/mount/f /new/f; echo
			cat /etc/hosts | grep -c localhost; touch ~/x /workspace/x /tmp/x
			for d in / /bin /etc /opt /var /var/deep /home /new; do touch $d/x 2>/dev/null && echo WRITTEN $d; done; true`)
		if want := "agent\n/opt/bin\n/workspace\nimagedataothermountedmounted\n2\n"; out != want {
			t.Errorf("%s:\n%q\nwant\n%q", form, out, want)
		}
		if _, err := f.RemoveImage(t.Context(), infos[0].Digest); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("removing an image in use: %v", err)
		}
		if err := f.Remove(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if clean, err := f.RemoveImage(t.Context(), infos[0].Digest); err == nil {
			clean()
		} else {
			t.Error(err)
		}
	}
	if infos, err := f.Images(t.Context()); err != nil || len(infos) != 0 {
		t.Errorf("%v, %v", infos, err)
	}
	_, err = f.Put(t.Context(), wire.BoxSpec{ID: "named", Image: "layout", Limits: limits})
	wantCode(t, err, errdefs.NotFound, "no image")
}

// The shape of a root directory, whatever the image has in places we need.
func TestPlans(t *testing.T) {
	t.Parallel()
	src := t.TempDir()
	for p, content := range map[string]string{"usr/bin/x": "x", "usr/share/doc/y": "y", "etc/os-release": "z", "tmp/secret": "s", "workspace/w": "w", "big/0": ""} {
		writeFile(t, src+"/"+p, content, 0o644)
	}
	for i := range maxSplit + 1 {
		writeFile(t, src+"/big/"+strings.Repeat("n", 1+i%200)+string(rune('a'+i/200)), "", 0o644)
	}
	if err := os.Symlink("usr/bin", src+"/bin"); err != nil {
		t.Fatal(err)
	}
	newPlan := func() *plan {
		p := &plan{root: &node{source: src}}
		if err := p.root.takeApart("/"); err != nil {
			t.Fatal(err)
		}
		return p
	}
	dests := func(p *plan) []string {
		var ds []string
		for _, b := range p.binds() {
			ds = append(ds, b.Dest)
		}
		return ds
	}
	p := newPlan()
	if err := p.point("/usr/share/doc", false); err != nil {
		t.Fatal(err)
	}
	if got := dests(p); !slices.Equal(got, []string{"/big", "/etc", "/tmp", "/usr", "/workspace"}) {
		t.Errorf("a mount point that exists: %v", got)
	}
	if err := p.point("/usr/share/new/deep", false); err != nil {
		t.Fatal(err)
	}
	if got := dests(p); !slices.Equal(got, []string{"/big", "/etc", "/tmp", "/usr/bin", "/usr/share/doc", "/workspace"}) {
		t.Errorf("a mount point that is missing: %v", got)
	}
	if err := p.point("/etc/os-release", true); err != nil {
		t.Error(err)
	}
	for dest, part := range map[string]string{"/big/missing": "entries", "/bin/below-a-link": "not a directory", "/etc/os-release/x": "not a directory"} {
		wantCode(t, p.point(dest, false), errdefs.Invalid, part)
	}
	dir := t.TempDir()
	for range 2 { // building again changes nothing
		if err := p.build(dir); err != nil {
			t.Fatal(err)
		}
	}
	if target, err := os.Readlink(dir + "/bin"); err != nil || target != "usr/bin" {
		t.Errorf("link: %q, %v", target, err)
	}
	if st, err := os.Stat(dir + "/usr/share/new/deep"); err != nil || !st.IsDir() {
		t.Errorf("mount point: %v", err)
	}
	if err := os.Remove(dir + "/bin"); err != nil {
		t.Fatal(err)
	}
	writeFile(t, dir+"/bin", "", 0o644)
	if err := p.build(dir); err != errClash {
		t.Errorf("another shape: %v", err)
	}
}
