package worker

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ends are the pipes of one process: no bytes pass through anything else.
type ends struct {
	inR, inW, outR, outW, errR, errW *os.File
}

// open makes the pipes. owner is the user whose they are, so that the process can
// open /dev/stdout, which is an ordinary open of the pipe; -1 is this user.
func (e *ends) open(stdin bool, owner int) (err error) {
	defer func() {
		if err != nil {
			e.closeChild()
			e.closeOurs()
		}
	}()
	if stdin {
		if e.inR, e.inW, err = pipe(owner); err != nil {
			return err
		}
	} else if e.inR, err = os.Open(os.DevNull); err != nil {
		return err
	}
	if e.outR, e.outW, err = pipe(owner); err != nil {
		return err
	}
	e.errR, e.errW, err = pipe(owner)
	return err
}

func pipe(owner int) (r, w *os.File, err error) {
	if r, w, err = os.Pipe(); err != nil || owner < 0 {
		return r, w, err
	}
	c, err := r.SyscallConn()
	if err == nil {
		var own error
		err = c.Control(func(fd uintptr) { own = unix.Fchown(int(fd), owner, owner) })
		if err == nil {
			err = own
		}
	}
	if err != nil {
		r.Close()
		w.Close()
		return nil, nil, os.NewSyscallError("fchown", err)
	}
	return r, w, nil
}

// child are the ends of the process, as its descriptors 0, 1 and 2.
func (e *ends) child() []*os.File { return []*os.File{e.inR, e.outW, e.errW} }

func (e *ends) closeChild() { closeAll(e.inR, e.outW, e.errW) }

func (e *ends) closeOurs() { closeAll(e.inW, e.outR, e.errR) }

func closeAll(fs ...*os.File) {
	for _, f := range fs {
		if f != nil {
			_ = f.Close()
		}
	}
}

// in, out and err are our ends.
func (e *ends) in() io.WriteCloser {
	if e.inW == nil {
		return noInput{}
	}
	return e.inW
}

func (e *ends) out() io.ReadCloser { return e.outR }

func (e *ends) err() io.ReadCloser { return e.errR }

// noInput is the input of a process that has none.
type noInput struct{}

func (noInput) Write([]byte) (int, error) { return 0, os.ErrClosed }

func (noInput) Close() error { return nil }
