package pluginlegacy

import (
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/shelf"
)

// Directories below DATA.
const (
	pluginsDir = "plugins"
	stagingDir = ".plugin-staging"
	backupsDir = ".plugin-backups"
)

// maxPlugins bounds how many directories are looked at.
const maxPlugins = 10_000

// base is the name of a plugin's directory.
func base(author, name string) string { return author + "__" + name }

func (o *Owner) dir(elem ...string) string {
	return filepath.Join(append([]string{o.cfg.DataDir}, elem...)...)
}

// plugins lists the legacy directory by name. What does not bear the name of its
// manifest is left out and said.
func (o *Owner) plugins() ([]Plugin, error) {
	ents, err := os.ReadDir(o.dir(pluginsDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, shelf.Refusal(err, "the directory of plugins cannot be read")
	}
	if len(ents) > maxPlugins {
		return nil, errdefs.New(errdefs.Exhausted, "%s has more than %d entries, the limit", o.dir(pluginsDir), maxPlugins)
	}
	var out []Plugin
	for _, e := range ents {
		dir := o.dir(pluginsDir, e.Name())
		if st, err := os.Stat(dir); err != nil || !st.IsDir() || strings.HasPrefix(e.Name(), ".") || e.Name() == "__pycache__" {
			continue // a link to a directory is one
		}
		p, _, err := read(dir)
		if err == nil && base(p.Author, p.Name) != e.Name() {
			err = errdefs.New(errdefs.Conflict, "its manifest is that of %s/%s", p.Author, p.Name).
				WithNext("name the directory %s", base(p.Author, p.Name))
		}
		if err != nil {
			o.log.Warn("a directory is no plugin and is left alone", "dir", dir, "err", err)
			continue
		}
		out = append(out, p)
	}
	return out, nil
}

// read returns the plugin of a directory and its version.
func read(dir string) (Plugin, string, error) {
	m, err := artifact.ReadManifest(dir)
	if err != nil {
		return Plugin{}, "", err
	}
	return Plugin{Author: m.Author, Name: m.Name, Dir: dir}, m.Version, nil
}

// installed returns the plugin that is in the directory of an identity.
func (o *Owner) installed(author, name string) (p Plugin, version string, ok bool, err error) {
	p, version, err = read(o.dir(pluginsDir, base(author, name)))
	if errdefs.Is(err, errdefs.NotFound) {
		return Plugin{}, "", false, nil
	}
	if err == nil && (p.Author != author || p.Name != name) {
		err = errdefs.New(errdefs.Conflict, "the directory of %s/%s holds plugin %s/%s", author, name, p.Author, p.Name)
	}
	return p, version, err == nil, err
}

// fresh makes an unused name in a directory of DATA, which it makes if it is missing.
func (o *Owner) fresh(in, stem string) (string, error) {
	if err := os.MkdirAll(o.dir(in), 0o755); err != nil {
		return "", shelf.Refusal(err, "the directory %s cannot be made", o.dir(in))
	}
	return o.dir(in, stem+"-"+strings.ToLower(rand.Text()[:16])), nil
}

// move renames a directory, and makes the rename last.
func (o *Owner) move(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return shelf.Refusal(err, "%s cannot be moved to %s", from, to)
	}
	for _, d := range []string{filepath.Dir(from), filepath.Dir(to)} {
		if err := durable.SyncDir(d); err != nil {
			return shelf.Refusal(err, "%s cannot be written through", d)
		}
	}
	return nil
}

// discard takes a directory out of sight at once, then removes it; what cannot be
// removed stays in the staging directory for the next start.
func (o *Owner) discard(dir, stem string) error {
	to, err := o.fresh(stagingDir, stem)
	if err != nil {
		return err
	}
	if err := o.move(dir, to); err != nil {
		return err
	}
	o.remove(to)
	return nil
}

func (o *Owner) remove(dir string) {
	if err := os.RemoveAll(dir); err != nil {
		o.log.Warn("a directory stays behind until the next start", "dir", dir, "err", err)
	}
}

// writeThrough makes everything below a directory last, by way of its file system.
func writeThrough(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return shelf.Refusal(err, "the plugin cannot be written through")
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return shelf.Refusal(err, "the plugin cannot be written through")
	}
	return nil
}

// repair undoes what a crash has left. A backup is a generation whose successor was
// never committed: it goes back to its place.
func (o *Owner) repair() error {
	ents, err := os.ReadDir(o.dir(backupsDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return shelf.Refusal(err, "the backups of plugins cannot be read")
	}
	for _, e := range ents {
		backup := o.dir(backupsDir, e.Name())
		p, version, err := read(backup)
		if err != nil {
			o.log.Warn("a backup is no plugin and is left alone", "dir", backup, "err", err)
			continue
		}
		if err := os.MkdirAll(o.dir(pluginsDir), 0o755); err != nil {
			return shelf.Refusal(err, "the directory of plugins cannot be made")
		}
		place := o.dir(pluginsDir, base(p.Author, p.Name))
		if _, err := os.Lstat(place); err == nil {
			if err := o.discard(place, filepath.Base(place)); err != nil {
				return err
			}
		}
		if err := o.move(backup, place); err != nil {
			return err
		}
		o.log.Warn("an installation was cut off: the plugin is what it was before", "plugin", p.Author+"/"+p.Name, "version", version)
	}
	ents, err = os.ReadDir(o.dir(stagingDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return shelf.Refusal(err, "the staging directory of plugins cannot be read")
	}
	for _, e := range ents {
		o.remove(o.dir(stagingDir, e.Name()))
	}
	return nil
}

// cut returns the first n bytes of a text, whole characters.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
