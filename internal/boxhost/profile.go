package boxhost

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/image"
	"github.com/stockade-run/stockade/internal/oci"
)

// bindSource is something of the machine shown in every box.
type bindSource struct{ dest, source string }

// basePath is the PATH of the host profile, and of images that have none.
const basePath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// hostProfile checks what the operator listed and returns the sources and PATH.
func hostProfile(dirs []string, tools map[string]string) ([]bindSource, string, error) {
	var sources []bindSource
	for _, d := range oci.SystemDirs() {
		if _, err := os.Lstat(d); err == nil {
			sources = append(sources, bindSource{d, d})
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, "", err
		}
	}
	for _, d := range dirs {
		if err := checkShown("the profile directory", d); err != nil {
			return nil, "", err
		}
		for _, p := range []string{"/proc", "/dev", "/sys", "/tmp", "/.stockade", oci.Workspace, oci.Home} {
			_, inside := below(d, p)
			_, around := below(p, d)
			if inside || around || d == "/etc" {
				return nil, "", errdefs.New(errdefs.Invalid, "the profile directory %s cannot be shown: the box has its own", clip(d)).
					WithNext("list the directories in it that are needed")
			}
		}
		real, err := filepath.EvalSymlinks(d)
		if err != nil {
			return nil, "", err
		}
		sources = append(sources, bindSource{d, real})
	}
	for _, t := range toolSources(tools) {
		name := strings.TrimPrefix(t.dest, "/opt/")
		if err := ident.CheckName("the tool's name", name); err != nil {
			return nil, "", err
		}
		if err := checkShown("the tool "+name, t.source); err != nil {
			return nil, "", err
		}
	}
	return sources, withTools(basePath, tools), nil
}

func checkShown(what, dir string) error {
	if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/" {
		return errdefs.New(errdefs.Invalid, "%s is %q and must be an absolute, clean path below /", what, clip(dir))
	}
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		return errdefs.Wrap(err, errdefs.Invalid, "%s, %s, is not a directory", what, clip(dir)).WithNext("make it, or leave it out")
	}
	return nil
}

// toolSources are the tools by name; each is shown at /opt/NAME.
func toolSources(tools map[string]string) []bindSource {
	var ts []bindSource
	for name, dir := range tools {
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			dir = real
		}
		ts = append(ts, bindSource{"/opt/" + name, dir})
	}
	slices.SortFunc(ts, func(a, b bindSource) int { return strings.Compare(a.dest, b.dest) })
	return ts
}

// withTools puts the tools' program directories before a PATH.
func withTools(search string, tools map[string]string) string {
	var dirs []string
	for _, t := range toolSources(tools) {
		for _, sub := range []string{"bin", "node_modules/.bin"} {
			if st, err := os.Stat(filepath.Join(t.source, sub)); err == nil && st.IsDir() {
				dirs = append(dirs, path.Join(t.dest, sub))
			}
		}
	}
	return strings.Join(append(dirs, search), ":")
}

// The box's own files of /etc. There is no resolver: names are resolved outside,
// by the gateway.
const (
	etcPasswd   = "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
	agentPasswd = "agent:x:1000:1000:agent:/home/agent:/bin/sh\n"
	etcGroup    = "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n"
	agentGroup  = "agent:x:1000:\n"
	etcHosts    = "127.0.0.1 localhost box\n::1 localhost\n"
	etcNsswitch = "passwd: files\ngroup: files\nhosts: files dns\n"
)

// planProfile is the root directory of a box of the host profile.
func planProfile(sources []bindSource) (*plan, error) {
	p := &plan{root: dirNode()}
	for dest, content := range map[string]string{
		"/etc/passwd": etcPasswd + agentPasswd, "/etc/group": etcGroup + agentGroup,
		"/etc/hosts": etcHosts, "/etc/nsswitch.conf": etcNsswitch, "/etc/resolv.conf": "",
	} {
		if err := p.write(dest, []byte(content)); err != nil {
			return nil, err
		}
	}
	for _, d := range []string{"/run", "/var", "/opt", "/sys"} {
		if _, err := p.dir(d); err != nil {
			return nil, err
		}
	}
	for _, s := range sources {
		if s.dest == s.source && p.has(s.dest, false) {
			continue // it lies in a directory that is shown already
		}
		if err := p.bind(s.dest, s.source); err != nil {
			return nil, err
		}
	}
	if v := p.root.children["var"]; v.children != nil {
		for name, target := range map[string]string{"tmp": "/tmp", "run": "/run"} {
			if v.children[name] == nil {
				v.children[name] = &node{link: target}
			}
		}
	}
	return p, nil
}

// planImage is the root directory of a box of an image. etc is the directory
// where this box's own files of /etc are kept.
func planImage(img image.Image, etc string) (*plan, error) {
	p := &plan{root: &node{source: img.Rootfs}}
	if err := p.root.takeApart("/"); err != nil {
		return nil, err
	}
	// These are the box's own, whatever the image has there.
	for _, name := range []string{"proc", "dev", "sys", "tmp", ".stockade", "workspace"} {
		delete(p.root.children, name)
	}
	if _, err := p.dir("/sys"); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(etc, 0o755); err != nil {
		return nil, err
	}
	for _, f := range []struct{ name, base, id, line string }{
		{"passwd", etcPasswd, "1000", agentPasswd}, {"group", etcGroup, "1000", agentGroup},
		{"hosts", etcHosts, "", ""}, {"resolv.conf", "", "", ""},
	} {
		own, err := ownEtc(filepath.Join(img.Rootfs, "etc", f.name), f.base, f.id, f.line)
		if err != nil {
			return nil, err
		}
		if own == nil {
			continue
		}
		file := filepath.Join(etc, f.name)
		if have, err := os.ReadFile(file); err != nil || string(have) != string(own) {
			if err := os.WriteFile(file, own, 0o644); err != nil {
				return nil, err
			}
		}
		dest := "/etc/" + f.name
		if p.has(dest, true) {
			p.over = append(p.over, oci.Bind{Source: file, Dest: dest})
			continue
		}
		if err := p.bind(dest, file); err != nil {
			// The image has a large /etc without such a file, or a link in its place:
			// it is left as it is.
			continue
		}
	}
	return p, nil
}

// ownEtc returns what the box shows instead of a file of the image: the image's
// users and groups with the agent added, unless the image knows the id; for
// files that are nobody's account, the base. nil leaves the image's file alone.
func ownEtc(file, base, id, line string) ([]byte, error) {
	if id == "" {
		return []byte(base), nil
	}
	st, err := os.Lstat(file)
	if errors.Is(err, fs.ErrNotExist) {
		return []byte(base + line), nil
	}
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > 1<<20 {
		return nil, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for l := range strings.Lines(string(b)) {
		if f := strings.Split(l, ":"); len(f) > 2 && f[2] == id {
			return nil, nil
		}
	}
	if len(b) > 0 && b[len(b)-1] != '\n' {
		b = append(b, '\n')
	}
	return append(b, line...), nil
}
