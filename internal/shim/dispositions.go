package shim

import (
	"syscall"
	"unsafe"
)

// sigaction is the kernel's struct of rt_sigaction(2) on amd64 and arm64.
type sigaction struct {
	handler, flags, restorer uintptr
	mask                     uint64
}

const (
	sigDefault = 0
	sigIgnore  = 1
	firstRT    = 32 // signal(7): real-time signals, of which libc keeps the first two
	lastRT     = 64
)

// heedRealTime gives the real-time signals that whoever started us ignores their
// default again. os/signal cannot: it leaves the ones of the C library alone, and
// posix_spawn(3) of glibc starts every program with signal 32 ignored.
func heedRealTime() {
	for sig := uintptr(firstRT); sig <= lastRT; sig++ {
		var now sigaction
		if _, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, sig, 0, uintptr(unsafe.Pointer(&now)), 8, 0, 0); errno != 0 || now.handler != sigIgnore {
			continue
		}
		now = sigaction{handler: sigDefault}
		// Where it fails the signal stays ignored, as it was.
		_, _, _ = syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&now)), 0, 8, 0, 0)
	}
}
