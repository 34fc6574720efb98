package osproc

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// OpenWorkspace opens the directory path for use as Config.Dir, if it is one of
// the allowed directories or below one, and returns it with its real path. Links
// are followed only as long as they do not lead out of the allowed directory, and
// the answer holds for the directory that was opened, whatever is moved
// afterwards. path "" is the first allowed directory. The error is denied when
// the path is not allowed, not_found or invalid when it is no directory.
func OpenWorkspace(allowed []string, path string) (*os.File, string, error) {
	if path == "" && len(allowed) > 0 {
		path = allowed[0]
	}
	if !filepath.IsAbs(path) || strings.ContainsRune(path, 0) {
		return nil, "", errdefs.New(errdefs.Invalid, "the workspace %q is not an absolute path", path)
	}
	path = filepath.Clean(path)
	var last error
	for _, root := range allowed {
		rel, ok := below(root, path)
		if !ok {
			continue
		}
		f, err := openBelow(root, rel)
		if err != nil {
			last = err
			continue
		}
		real, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
		if err != nil {
			_ = f.Close()
			return nil, "", errdefs.Wrap(err, errdefs.Unavailable, "the workspace %s has no path", path)
		}
		return f, real, nil
	}
	switch {
	case last == nil:
		return nil, "", errdefs.New(errdefs.Denied, "the workspace %s is not below a directory that this machine allows", path).
			WithNext("start the client with --allow-workspace for it")
	case errors.Is(last, unix.ENOENT):
		return nil, "", errdefs.Wrap(last, errdefs.NotFound, "the workspace %s does not exist on this machine", path)
	case errors.Is(last, unix.ENOTDIR):
		return nil, "", errdefs.Wrap(last, errdefs.Invalid, "the workspace %s is not a directory", path)
	case errors.Is(last, unix.EXDEV), errors.Is(last, unix.ELOOP):
		return nil, "", errdefs.Wrap(last, errdefs.Denied, "the workspace %s leads out of the directory that this machine allows", path)
	default:
		return nil, "", errdefs.Wrap(last, errdefs.Denied, "the workspace %s cannot be opened: %v", path, last)
	}
}

// below returns path relative to root, also when root is written with links and
// path without them.
func below(root, path string) (string, bool) {
	for _, r := range []string{root, realPath(root)} {
		if rel, err := filepath.Rel(r, path); r != "" && err == nil && filepath.IsLocal(rel) {
			return rel, true
		}
	}
	return "", false
}

func realPath(path string) string {
	real, _ := filepath.EvalSymlinks(path)
	return real
}

func openBelow(root, rel string) (*os.File, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	for {
		fd, err := unix.Openat2(dir, rel, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS,
		})
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) { // something was renamed meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), rel), nil
	}
}
