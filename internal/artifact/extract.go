package artifact

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io/fs"
	"os"
	"path"
	"slices"

	"github.com/stockade-run/stockade/internal/shelf"
)

// Inspect checks an archive by every rule that needs no disk and reads its
// manifest. The content of the other files is not looked at.
func Inspect(archive []byte) (Manifest, error) {
	p, err := read(archive, DefaultLimits())
	if err != nil {
		return Manifest{}, err
	}
	return p.manifest, nil
}

// ExtractTo unpacks an archive into an existing empty directory by the same rules,
// writable: directories 0755, files 0644 or 0755. The caller removes the
// directory after an error.
func ExtractTo(ctx context.Context, archive []byte, dir string) (Manifest, error) {
	p, err := read(archive, DefaultLimits())
	if err != nil {
		return Manifest{}, err
	}
	if _, err := p.extract(ctx, dir, 0o755, 0o644); err != nil {
		return Manifest{}, err
	}
	return p.manifest, nil
}

// listed is one file as it was published.
type listed struct {
	Path   string `json:"path"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	Exec   bool   `json:"exec,omitempty"`
}

// extract writes everything below dir, which is never left, and returns the files
// by path. Modes of what is executable get the execute bits of who may read.
func (p *plan) extract(ctx context.Context, dir string, dirMode, fileMode fs.FileMode) ([]listed, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, shelf.Refusal(err, "the plugin package cannot be unpacked")
	}
	defer root.Close()
	made := map[string]bool{".": true}
	for _, d := range p.dirs {
		if err := mkdirs(root, d, dirMode, made); err != nil {
			return nil, err
		}
	}
	list := make([]listed, 0, len(p.files))
	for _, f := range p.files {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err := mkdirs(root, path.Dir(f.path), dirMode, made); err != nil {
			return nil, err
		}
		l, err := f.write(root, fileMode)
		if err != nil {
			return nil, err
		}
		list = append(list, l)
	}
	slices.SortFunc(list, func(a, b listed) int { return bytes.Compare([]byte(a.Path), []byte(b.Path)) })
	return list, nil
}

// mkdirs makes a directory and its parents, with the mode whatever the umask is.
func mkdirs(root *os.Root, dir string, mode fs.FileMode, made map[string]bool) error {
	if made[dir] {
		return nil
	}
	if err := mkdirs(root, path.Dir(dir), mode, made); err != nil {
		return err
	}
	err := root.Mkdir(dir, 0o700)
	if err == nil {
		err = root.Chmod(dir, mode)
	}
	if err != nil {
		return shelf.Refusal(err, "the directory %q of the plugin package cannot be made", clip(dir))
	}
	made[dir] = true
	return nil
}

func (f file) write(root *os.Root, mode fs.FileMode) (l listed, err error) {
	out, err := root.OpenFile(f.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return l, shelf.Refusal(err, "the file %q of the plugin package cannot be made", clip(f.path))
	}
	w := &sink{out: out, hash: sha256.New()}
	err = f.content(w)
	l = listed{Path: f.path, Size: w.n, SHA256: hex.EncodeToString(w.hash.Sum(nil)), Exec: f.exec && runnable(w.head)}
	if err == nil {
		if l.Exec {
			mode |= mode >> 2 & 0o111
		}
		err = out.Chmod(mode)
	}
	if err = errors.Join(err, out.Close()); err == nil {
		return l, nil
	}
	_ = root.Remove(f.path) // a part of a file is never left, whoever owns the directory
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return l, shelf.Refusal(p, "the file %q of the plugin package cannot be written", clip(f.path))
	}
	return l, err
}

// sink writes to a file, hashes, and keeps the first bytes.
type sink struct {
	out  *os.File
	hash hash.Hash
	head []byte
	n    int64
}

// runnable reports whether execve(2) could do something with a file: an ELF
// program or a script with an interpreter.
func runnable(head []byte) bool {
	return bytes.HasPrefix(head, []byte("\x7fELF")) || bytes.HasPrefix(head, []byte("#!"))
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.out.Write(p)
	s.hash.Write(p[:n])
	if len(s.head) < 4 {
		s.head = append(s.head, p[:min(n, 4-len(s.head))]...)
	}
	s.n += int64(n)
	if err != nil {
		return n, &writeError{err}
	}
	return n, nil
}
