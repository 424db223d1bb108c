variable "fleet_id" {
  description = "[fleet] fleet_id: label of this installation's machines, and prefix of all names."
  type        = string
  default     = "spillway"
  validation {
    condition     = can(regex("^[a-z0-9-]{1,40}$", var.fleet_id))
    error_message = "Lower-case letters, digits and hyphens, at most 40, as in [fleet] fleet_id."
  }
}

variable "zones" {
  description = "Availability zones of workers. Spot machines of one zone are lost together."
  type        = list(string)
  validation {
    condition     = length(var.zones) >= 1 && length(var.zones) <= 16 && length(distinct(var.zones)) == length(var.zones)
    error_message = "One to sixteen zones, each once."
  }
}

variable "cidr_block" {
  description = "Addresses of the network; each zone gets a sixteenth."
  type        = string
  default     = "10.87.0.0/16"
}

variable "image_id" {
  description = "Machine image of workers, with Docker, NVIDIA's driver and container toolkit, and the image of vLLM with the sidecar."
  type        = string
}

variable "root_device" {
  description = "Name of the image's root device."
  type        = string
  default     = "/dev/sda1"
}

variable "disk_gib" {
  description = "Size of a worker's disk."
  type        = number
  default     = 120
}

variable "callers" {
  description = "Addresses (CIDRs) that may call the API."
  type        = list(string)
  default     = ["0.0.0.0/0"]
}

variable "workers_elsewhere" {
  description = "Addresses (CIDRs) of workers outside this network, which connect to the queue over TLS."
  type        = list(string)
  default     = []
}
