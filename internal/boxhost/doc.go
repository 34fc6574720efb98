// Package boxhost owns the boxes of one machine.
package boxhost
