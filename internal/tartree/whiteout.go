package tartree

import (
	"errors"
	"io/fs"
	"path"
	"strings"
)

// Names of whiteouts, from the OCI image specification, "Whiteouts".
const (
	whiteoutPrefix = ".wh."
	opaqueWhiteout = ".wh..wh..opq"
)

// whiteout carries out a whiteout and reports whether name is one. It hides only
// what lower layers made, wherever it stands in its own layer.
func (x *extraction) whiteout(name string) (bool, error) {
	dir, base := path.Split(name)
	if base == opaqueWhiteout {
		return true, x.purge(path.Clean(dir), true)
	}
	hidden, ok := strings.CutPrefix(base, whiteoutPrefix)
	if !ok {
		return false, nil
	}
	if strings.HasPrefix(hidden, whiteoutPrefix) || hidden == "" || hidden == "." || hidden == ".." {
		return true, nil // bookkeeping of aufs
	}
	return true, x.purge(path.Join(dir, hidden), false)
}

// purge removes what lower layers have at name, or only below it.
func (x *extraction) purge(name string, below bool) error {
	if !below && !x.made[name] {
		return x.root.RemoveAll(name)
	}
	st, err := x.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || !st.IsDir() {
		return err
	}
	ents, err := fs.ReadDir(x.root.FS(), name)
	if err != nil {
		return err
	}
	for _, e := range ents {
		if err := x.purge(path.Join(name, e.Name()), false); err != nil {
			return err
		}
	}
	return nil
}
