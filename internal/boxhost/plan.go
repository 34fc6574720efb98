package boxhost

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
)

// maxSplit bounds how many entries a directory may have that must be shown one
// by one because a mount point is missing in it; each costs the runtime a mount.
const maxSplit = 256

// node is one path of a box's root directory, as it will be made: a directory of
// our own, a symbolic link, or something of the machine that is bound there.
type node struct {
	children map[string]*node // a directory of our own
	link     string           // a symbolic link
	source   string           // bound from here
	file     bool             // what is bound is not a directory
	content  []byte           // a file of our own
	covered  bool             // something writable or virtual is mounted here
	open     bool             // a directory with the mode of /tmp
}

func dirNode() *node { return &node{children: map[string]*node{}} }

// plan is the shape of a box's root directory.
//
// It holds only directories, links and mount points, so it costs nothing and
// every mount the box needs has a place, whatever the image lacks: a directory
// of the image is bound whole where possible, and taken apart where a mount
// point must be made inside it.
type plan struct {
	over []oci.Bind // files bound over files of the machine, after everything else
	root *node
}

// split is a path's elements.
func split(p string) []string { return strings.Split(strings.Trim(path.Clean(p), "/"), "/") }

// bind shows a path of the machine at dest. Where dest exists already as
// something else, it is replaced.
func (p *plan) bind(dest, source string) error {
	st, err := os.Lstat(source)
	if err != nil {
		return err
	}
	n, err := nodeOf(source, st)
	if n == nil || err != nil {
		return err
	}
	dir, err := p.dir(path.Dir(dest))
	if err != nil {
		return err
	}
	dir.children[path.Base(dest)] = n
	return nil
}

// nodeOf says how something of the machine is shown; nil: not at all.
func nodeOf(source string, st fs.FileInfo) (*node, error) {
	switch {
	case st.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(source)
		return &node{link: target}, err
	case st.IsDir():
		if emptyDir(source) {
			return dirNode(), nil // saves a mount
		}
		return &node{source: source}, nil
	case st.Mode().IsRegular():
		return &node{source: source, file: true}, nil
	}
	return nil, nil
}

func emptyDir(dir string) bool {
	f, err := os.Open(dir)
	if err != nil {
		return false
	}
	defer f.Close()
	names, _ := f.Readdirnames(1)
	return len(names) == 0
}

// dir returns the node of a directory of our own at p, making it, and taking
// apart what is bound above it.
func (p *plan) dir(dest string) (*node, error) {
	n := p.root
	if path.Clean(dest) == "/" {
		return n, nil
	}
	at := ""
	for _, part := range split(dest) {
		at += "/" + part
		next := n.children[part]
		if next == nil {
			next = dirNode()
			n.children[part] = next
		}
		if next.covered || next.content != nil || next.file || next.link != "" {
			return nil, errdefs.New(errdefs.Invalid, "a mount point at %s cannot be made: %s is not a directory of the root file system", dest, at)
		}
		if next.source != "" {
			if err := next.takeApart(at); err != nil {
				return nil, err
			}
		}
		n = next
	}
	return n, nil
}

// takeApart turns a bound directory into one of our own with the same content.
func (n *node) takeApart(at string) error {
	ents, err := os.ReadDir(n.source)
	if err != nil {
		return err
	}
	if len(ents) > maxSplit {
		return errdefs.New(errdefs.Invalid, "a mount point below %s is missing in the root file system and cannot be added: the directory has %d entries, the limit is %d", at, len(ents), maxSplit).
			WithNext("choose a destination that exists, or one outside of %s", at)
	}
	children := map[string]*node{}
	for _, e := range ents {
		st, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		c, err := nodeOf(filepath.Join(n.source, e.Name()), st)
		if err != nil {
			return err
		}
		if c != nil {
			children[e.Name()] = c
		}
	}
	n.children, n.source = children, ""
	return nil
}

// point makes a mount point for something that is not bound read-only from the
// machine: a volume, a virtual file system, an asked-for mount. Nothing can be
// planned below it any more. Where the root file system has the directory
// already, nothing is made.
func (p *plan) point(dest string, file bool) error {
	if p.has(dest, file) {
		return nil
	}
	dir, err := p.dir(path.Dir(dest))
	if err != nil {
		return err
	}
	base := path.Base(dest)
	if old := dir.children[base]; old != nil && old.children != nil && len(old.children) > 0 && !file {
		return nil // a directory of our own is a mount point as it is
	}
	n := &node{children: map[string]*node{}, covered: true}
	if file {
		n = &node{content: []byte{}, covered: true}
	}
	dir.children[base] = n
	return nil
}

// has reports whether dest lies inside a bound directory and exists there, every
// element being a real directory.
func (p *plan) has(dest string, file bool) bool {
	n := p.root
	parts := split(dest)
	for i, part := range parts {
		if n.source != "" {
			at := n.source
			for j, rest := range parts[i:] {
				at = filepath.Join(at, rest)
				st, err := os.Lstat(at)
				last := i+j == len(parts)-1
				if err != nil || last && file != st.Mode().IsRegular() || !(last && file) && !st.IsDir() {
					return false
				}
			}
			return true
		}
		if n.children == nil || n.covered {
			return false
		}
		if n = n.children[part]; n == nil {
			return false
		}
	}
	return n.source != "" && n.file == file
}

// write puts a file of our own at dest.
func (p *plan) write(dest string, content []byte) error {
	dir, err := p.dir(path.Dir(dest))
	if err != nil {
		return err
	}
	dir.children[path.Base(dest)] = &node{content: content}
	return nil
}

// binds lists what is bound, parents first.
func (p *plan) binds() []oci.Bind {
	var bs []oci.Bind
	p.walk(func(at string, n *node) {
		if n.source != "" {
			bs = append(bs, oci.Bind{Source: n.source, Dest: at})
		}
	})
	return append(bs, p.over...)
}

func (p *plan) walk(fn func(at string, n *node)) {
	var rec func(at string, n *node)
	rec = func(at string, n *node) {
		names := make([]string, 0, len(n.children))
		for name := range n.children {
			names = append(names, name)
		}
		slices.SortFunc(names, cmp.Compare[string])
		for _, name := range names {
			c := n.children[name]
			fn(path.Join(at, name), c)
			rec(path.Join(at, name), c)
		}
	}
	rec("/", p.root)
}

// build makes the root directory. What is there and right stays: a container may
// be using it. It returns errClash when something else stands in the way.
func (p *plan) build(dir string) error {
	if err := makeAll(dir); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o755); err != nil { // the umask
		return err
	}
	var failed error
	p.walk(func(at string, n *node) {
		if failed == nil {
			failed = n.build(filepath.Join(dir, at))
		}
	})
	return failed
}

// makeAll makes a directory and those above it, which can be entered and not
// listed by others. Another host program may be removing an empty one above at
// the same moment.
func makeAll(dir string) error {
	var err error
	for range 100 {
		if err = os.MkdirAll(filepath.Dir(dir), 0o711); err == nil {
			if err = os.Mkdir(dir, 0o755); err == nil || errors.Is(err, fs.ErrExist) {
				return nil
			}
		}
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return err
}

// errClash says that a path of the root directory is of another kind than planned.
var errClash = errors.New("the root directory has another shape")

func (n *node) build(at string) error {
	st, err := os.Lstat(at)
	missing := errors.Is(err, fs.ErrNotExist)
	if err != nil && !missing {
		return err
	}
	switch {
	case n.link != "":
		if missing {
			return os.Symlink(n.link, at)
		}
		if have, err := os.Readlink(at); err != nil || have != n.link {
			return errClash
		}
	case n.file || n.content != nil:
		if missing {
			return os.WriteFile(at, n.content, 0o644)
		}
		if !st.Mode().IsRegular() {
			return errClash
		}
		if n.source == "" && st.Size() != int64(len(n.content)) {
			return errClash
		}
	default:
		if missing {
			if err := os.Mkdir(at, 0o755); err != nil {
				return err
			}
			mode := fs.FileMode(0o755)
			if n.open {
				mode = 0o777 | fs.ModeSticky
			}
			return os.Chmod(at, mode)
		}
		if !st.IsDir() {
			return errClash
		}
	}
	return nil
}
