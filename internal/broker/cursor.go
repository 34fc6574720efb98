package broker

import (
	"strconv"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// A cursor is the end of its process's handle, a dot, and a position in the log,
// so that a cursor of one process is refused at another.
const cursorTag = 6

func cursorAt(handle string, position int64) string {
	return handle[max(0, len(handle)-cursorTag):] + "." + decimal(position)
}

// parseCursor returns the position a cursor names. oldest says that it is "",
// the oldest kept position, whichever that is.
func parseCursor(handle, s string) (position int64, oldest bool, err error) {
	if s == "" {
		return 0, true, nil
	}
	tag, digits, ok := strings.Cut(s, ".")
	if !ok || len(tag) != cursorTag {
		return 0, false, errdefs.New(errdefs.Invalid, "%q is no cursor", cutTo(s, 32)).WithNext("use a cursor from an earlier answer, or none for the oldest kept byte")
	}
	if tag != handle[len(handle)-cursorTag:] {
		return 0, false, errdefs.New(errdefs.Invalid, "the cursor %q is one of another process", cutTo(s, 32)).WithNext("use a cursor from an answer about %s", handle)
	}
	position, err = strconv.ParseInt(digits, 10, 64)
	if err != nil || position < 0 || position > api.MaxOffset || decimal(position) != digits {
		return 0, false, errdefs.New(errdefs.Invalid, "the cursor %q names no position from 0 to 2^53", cutTo(s, 32))
	}
	return position, false, nil
}
