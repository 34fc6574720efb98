package boxhost

import (
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
)

// Root is the root directory of containers that are no box: the host profile,
// and what their owner shows besides.
type Root struct {
	// Dir is where it is made. It must be reachable for the containers' user ids.
	Dir string
	// Shown are directories of this machine shown read-only at the same path, links
	// in it followed.
	Shown []string
	// Points and FilePoints are directories and files that the owner mounts
	// something at.
	Points, FilePoints []string
	// Names shows this machine's files for finding hosts by name, instead of files
	// that know localhost alone.
	Names bool
}

// Make makes the root directory, or completes it, and returns what is bound in
// it, in mount order. Mount points of a container's own (/proc, /dev, and PID 1)
// are there, /tmp is not, unless it is among the points. Containers of the same
// shape may share a root: it holds nothing but mount points and a few files.
func (r Root) Make() ([]oci.Bind, error) {
	sources, _, err := hostProfile(nil, nil)
	if err != nil {
		return nil, err
	}
	for _, d := range r.Shown {
		if err := checkShown("the directory to show", d); err != nil {
			return nil, err
		}
		real, err := filepath.EvalSymlinks(d)
		if err != nil {
			return nil, err
		}
		sources = append(sources, bindSource{d, real})
	}
	p, err := planProfile(sources)
	if err != nil {
		return nil, err
	}
	if r.Names {
		for _, f := range []string{"/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf"} {
			real, err := filepath.EvalSymlinks(f)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil {
				err = p.bind(f, real)
			}
			if err != nil {
				return nil, err
			}
		}
	}
	for _, d := range append([]string{"/proc", "/dev"}, r.Points...) {
		if err := p.point(d, false); err != nil {
			return nil, err
		}
	}
	for _, f := range append([]string{oci.InitPath}, r.FilePoints...) {
		if err := p.point(f, true); err != nil {
			return nil, err
		}
	}
	err = p.build(r.Dir)
	if errors.Is(err, errClash) {
		return nil, errdefs.Wrap(err, errdefs.Conflict, "another root directory is at %s", r.Dir)
	}
	return p.binds(), err
}

// RemoveTree deletes a path and everything below it that foreign programs may
// have written. It follows no link and enters no other mount; a path that does
// not exist is deleted. Nobody else may change the tree meanwhile.
func RemoveTree(path string) error { return removeTree(path) }
