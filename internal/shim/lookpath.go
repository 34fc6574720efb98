package shim

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// lookPath finds a command as execvp(3) does: a name with a slash is a path,
// any other is looked for in the directories of path, where an empty element is
// the working directory. A file that is found but may not be executed is
// remembered while the search goes on, because it explains more than "not found".
func lookPath(name, path string) (string, error) {
	if strings.Contains(name, "/") {
		if err := executable(name); err != nil {
			return "", fmt.Errorf("%s cannot be executed: %w", clip(name, nameText), err)
		}
		return name, nil
	}
	var found error
	for dir := range strings.SplitSeq(path, ":") {
		if dir == "" {
			dir = "."
		}
		file := dir + "/" + name
		err := executable(file)
		if err == nil {
			return file, nil
		}
		if found == nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			found = fmt.Errorf("%s cannot be executed: %w", clip(file, nameText), err)
		}
	}
	if found != nil {
		return "", found
	}
	return "", fmt.Errorf("%s: command not found in PATH %q", clip(name, nameText), clip(path, 512))
}

// executable says why a file cannot be executed by this process, as far as that
// can be told before trying.
func executable(file string) error {
	fi, err := os.Stat(file)
	if err != nil {
		return reason(err)
	}
	if fi.IsDir() {
		return syscall.EISDIR
	}
	if err := unix.Faccessat(unix.AT_FDCWD, file, unix.X_OK, unix.AT_EACCESS); err != nil {
		return err
	}
	return nil
}

// reason strips the operation and path that os adds to an error.
func reason(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}
